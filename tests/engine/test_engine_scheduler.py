import dataclasses

import numpy as np
import pytest
import torch

from layerflow_engine import Engine
from layerflow_engine.cache import NO_BLOCK, BlockAllocator, PagedCache
from layerflow_engine.config import TINY_COMPRESSED, TINY_GQA, TINY_HYBRID, TINY_MLA
from layerflow_engine.texts import library, passage


def test_an_allocator_never_hands_out_the_null_block_and_refuses_double_frees():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    assert blocks is not None
    assert blocks.tolist() == [1, 2, 3]
    assert allocator.allocate(1) is None
    allocator.release(np.array([2, NO_BLOCK]))
    with pytest.raises(AssertionError, match="twice"):
        allocator.release(np.array([2]))
    assert allocator.free == 1


def test_pages_give_back_what_was_written_and_zeros_elsewhere():
    cache = PagedCache(TINY_MLA)
    table = np.array([NO_BLOCK, 5, 2], dtype=np.int64)
    rows = {
        name: torch.randint(1, 9, (11, *plane.shape[2:])).to(plane.dtype) for name, plane in cache.tensors[1].items()
    }
    cache.write(1, table, 9, rows)
    pages = cache.gather(1, table, 0, 30, known=18)
    for name, plane in pages.items():
        assert torch.equal(plane[9:18], rows[name][:9])
        assert not plane[:9].any() and not plane[18:].any()
        assert len(plane) == 30
    with pytest.raises(AssertionError, match="lack blocks"):
        cache.write(1, table, 0, rows)


def test_stale_bytes_in_reused_blocks_change_nothing():
    prompt = passage(150, 100)
    for config in (TINY_GQA, TINY_MLA, TINY_HYBRID, TINY_COMPRESSED):
        clean, dirty = Engine(config), Engine(config)
        for planes in dirty.cache.tensors.values():
            for plane in planes.values():
                plane[1:] = float("nan") if plane.is_floating_point() else 77
        assert dirty.generate([prompt], 6)[0].tokens == clean.generate([prompt], 6)[0].tokens


def test_a_sliding_group_holds_a_window_of_blocks():
    engine = Engine(TINY_HYBRID)
    sliding, full = engine.cache.allocators
    engine.submit(passage(500), 3, "a")
    held = []
    while engine.step():
        held.append((sliding.capacity - sliding.free, full.capacity - full.free))
    window, step, size = TINY_HYBRID.window, TINY_HYBRID.step_tokens, TINY_HYBRID.block_size
    assert max(blocks for blocks, _ in held) <= (window + step) // size + 2
    assert max(blocks for _, blocks in held) == -(-502 // size)
    assert sliding.free == sliding.capacity
    assert full.free == full.capacity


def test_requests_queue_for_blocks_and_all_are_answered():
    small = dataclasses.replace(TINY_GQA, num_blocks=30)
    prompts = [passage(150, 300 * index) for index in range(4)]
    assert [r.tokens for r in Engine(small).generate(prompts, 4)] == [
        r.tokens for r in Engine(TINY_GQA).generate(prompts, 4)
    ]


def test_a_step_keeps_to_its_budget_and_running_answers_go_first():
    engine = Engine(TINY_GQA)
    engine.submit("short", 5, "talking")
    engine.step()
    engine.submit(passage(300), 2, "long")
    seen = []
    while engine.step():
        report = engine.last_step
        assert report is not None
        assert sum(span.stop - span.start for span in report.spans) <= TINY_GQA.step_tokens
        assert len(report.waited_s) == len(report.computed_s) == TINY_GQA.num_layers
        seen.append([(span.request.id, span.start, span.stop) for span in report.spans])
    assert seen[0] == [("talking", 5, 6), ("long", 0, 96)]
    assert seen[1] == [("talking", 6, 7), ("long", 96, 192)]


def test_results_tell_what_happened():
    engine = Engine(TINY_GQA)
    result = engine.generate([b"\x00\xff some bytes"], 3)[0]
    assert len(result.tokens) == len(result.text) == 3
    assert (result.prompt_tokens, result.cached_tokens, result.restarts, result.aborted) == (13, 0, 0, False)
    assert 0 < result.ttft_s <= result.total_s


@pytest.mark.parametrize(("prompt", "tokens"), [("", 3), ("x", 0), ("x" * 800, 1), ("x" * 1020, 6)])
def test_what_cannot_be_answered_is_refused(prompt, tokens):
    with pytest.raises(ValueError, match="request"):
        Engine(TINY_GQA).submit(prompt, tokens)


def test_ids_are_taken_once_and_aborts_of_strangers_are_ignored():
    engine = Engine(TINY_GQA)
    engine.submit("x", 1, "a")
    engine.abort("nobody")
    with pytest.raises(ValueError, match="still on its way"):
        engine.submit("y", 1, "a")
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.connect(engine._connection)
    engine.abort("a")
    assert engine.results["a"].aborted
    assert not engine.step()


def test_texts_are_long_real_and_the_same_every_time():
    assert len(library()) > 10_000
    assert "Beautiful is better than ugly." in library()
    assert passage(4000) == passage(4000)
    assert len(passage(4000, 23_000).encode()) == 4000

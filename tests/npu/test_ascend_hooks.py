"""vLLM-Ascend's sequence of hooks on torch_npu tensors: loads layer by layer, saves that leave with a layer's writes.

The order is that of vllm_ascend/attention: wait for the layer, write its keys and values, say so, attend, say so again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

if not os.environ.get("LAYERFLOW_TEST_NPU"):
    pytest.skip("npu tests run by tests/npu/run.sh only", allow_module_level=True)

import torch_npu  # noqa: F401 - makes the device
from ascend_worker import FORWARD, AscendWorker, Group
from e2e.known import eventually

from layerflow import EmbeddedServer, Settings

LAYERS, BLOCKS, TOKENS, PATIENCE_S = 4, 96, 160, 20.0
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))
PLAIN = (Group("FullAttentionSpec", {"block_size": 16, "num_kv_heads": 2}, NAMES, (256, 192)),)
LATENT = (Group("MLAAttentionSpec", {"block_size": 32}, NAMES, (512, 64, 128)),)
# After DeepSeek-V4, with vLLM-Ascend's block sizes for a cache block of 32: rows (of 4 and 32 tokens instead of 128, so
# that prompts stay short), windows, states in blocks of 2 and 8.
SEVERAL = (
    Group("MLAAttentionSpec", {"block_size": 128, "tokens_per_state": 4}, NAMES[::2], (128, 32)),
    Group("MLAAttentionSpec", {"block_size": 1024, "tokens_per_state": 32}, NAMES[1::2], (128,)),
    Group(
        "SlidingWindowMLASpec", {"block_size": 32, "sliding_window": 64}, tuple(f"{n}.swa_cache" for n in NAMES), (128,)
    ),
    Group(
        "SlidingWindowMLASpec", {"block_size": 2, "sliding_window": 8}, tuple(f"{n}.state" for n in NAMES[::2]), (512,)
    ),
    Group(
        "SlidingWindowMLASpec",
        {"block_size": 8, "sliding_window": 128},
        tuple(f"{n}.state" for n in NAMES[1::2]),
        (512,),
    ),
)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    pool, transfer = {"size": "64MiB", "lease_ms": 60_000}, {"step_timeout_ms": 60_000, "save_timeout_ms": 60_000}
    with EmbeddedServer(Settings(pool=pool, transfer=transfer)) as running:
        yield running


def begin(worker: AscendWorker, plan: object, prefills: int) -> None:
    """What a pass does before its first layer."""
    worker.connector.handle_preemptions(plan)
    FORWARD.available = True
    worker.connector.bind_connector_metadata(plan)
    metadata = dict.fromkeys(NAMES, SimpleNamespace(num_prefills=prefills))
    worker.connector.start_load_kv(SimpleNamespace(attn_metadata=metadata))


def end(worker: AscendWorker, name: str) -> None:
    """And behind its last one; until nothing of the request is under way."""
    worker.connector.wait_for_save()
    worker.connector.clear_connector_metadata()
    FORWARD.available = False
    worker.connector.get_transfer_results(set())
    assert worker.agent.wait_idle(name, PATIENCE_S)
    assert not worker.connector.get_block_ids_with_load_errors()


def one_call_a_batch(worker: AscendWorker) -> None:
    told = worker.agent.statistics()
    assert told.failed_batches == 0
    assert told.copies.batches == told.copies.calls > 0, "one native call for each batch"
    assert not told.copies.single


@pytest.mark.parametrize(
    ("groups", "named", "prefills"),
    [(PLAIN, False, 1), (PLAIN, True, 1), (LATENT, True, 1), (LATENT, True, 0)],
    ids=["plain attention", "named", "latent", "latent without prefills"],
)
def test_layers_are_loaded_one_by_one_and_leave_when_written(server, monkeypatch, groups, named, prefills) -> None:
    worker = AscendWorker(server, groups, BLOCKS, monkeypatch)
    planes = len(groups[0].widths)
    assert [len(planes_) for planes_ in worker.side._layout.tensors.values()] == [planes] * LAYERS
    chain, here, there = worker.agent.chain(np.arange(TOKENS)), worker.tables(TOKENS, 0), worker.tables(TOKENS, 40)
    begin(worker, worker.saves("one", chain, here, TOKENS), 1)
    layer_bytes = sum(len(table) for table in here) * worker.spec.groups[0].bytes_per_block
    for layer, name in enumerate(NAMES):
        worker.connector.wait_for_layer_load(name)
        worker.compute(name, here, seed=1)
        worker.connector.on_kv_cache_written(name if named else "")
        # The layer has left although its attention has not been computed, let alone the next layer. The last one, which
        # completes the objects, waits for the end of the pass: until then some layer may be computed a second time.
        least = min(layer + 1, LAYERS - 1) * layer_bytes
        assert eventually(lambda least=least: worker.agent.statistics().saved_bytes >= least)
        worker.connector.save_kv_layer(name, None, None)
    end(worker, "one")

    hit = worker.agent.lookup("two", chain)
    assert hit.tokens == TOKENS - 1
    whole = hit.tokens // worker.spec.groups[0].block_size
    begin(worker, worker.loads("two", chain, there, hit, background=False), prefills)
    for name in NAMES:
        if prefills:
            worker.connector.wait_for_layer_load(name)
        # The stream of the engine waits for the copies: what it runs next sees every byte.
        for part in range(planes):
            loaded = worker.caches[name][part][: worker.blocks].cpu().numpy().reshape(worker.host[name, part].shape)
            stored = worker.host[name, part][here[0]]
            assert np.array_equal(loaded[there[0]][:whole], stored[:whole]), (name, part)
            worker.host[name, part][there[0]] = stored
        worker.connector.on_kv_cache_written(name if named else "")
        worker.connector.save_kv_layer(name, None, None)
    end(worker, "two")
    assert worker.wrong() == []
    one_call_a_batch(worker)
    worker.connector.shutdown()


def test_several_caches_a_layer_with_block_sizes_of_their_own(server, monkeypatch) -> None:
    """The hook names the attention layer; its other caches have no hook, and are done with the pass."""
    worker = AscendWorker(server, SEVERAL, BLOCKS, monkeypatch)
    spec = worker.spec
    assert sorted((group.block_size, group.ratio) for group in spec.groups) == [
        (2, 1),
        (8, 1),
        (32, 1),
        (128, 4),
        (1024, 32),
    ]
    tokens = 2 * spec.chunk_tokens
    chain = worker.agent.chain(np.arange(tokens + 1))
    here = tuple(stored_blocks(group, tokens, spec.chunk_tokens, 0) for group in spec.groups)
    begin(worker, worker.saves("one", chain, here, tokens), 1)
    for name in worker.caches:
        worker.compute(name, [table[table >= 0] for table in here], seed=2)
    for name in NAMES:
        worker.connector.wait_for_layer_load(name)
        worker.connector.on_kv_cache_written(name)
        worker.connector.save_kv_layer(name, None, None)
    end(worker, "one")

    hit = worker.agent.lookup("two", chain)
    assert hit.tokens == tokens
    there = tuple(stored_blocks(group, tokens, spec.chunk_tokens, 48) for group in spec.groups)
    begin(worker, worker.loads("two", chain, there, hit, background=True), 1)
    assert eventually(lambda: "two" in worker.side.transfers(forward=False)[1], PATIENCE_S)
    for number, group in enumerate(spec.groups):
        first = group.rules.first_token(tokens) // group.block_size
        for name in SEVERAL[worker.side._layout.vllm_groups[number]].layers:
            for part in range(len(worker.caches[name])):
                held = worker.host[name, part]
                held[there[number][first:]] = held[here[number][first:]]
    assert worker.agent.wait_idle("two", PATIENCE_S)
    assert worker.wrong() == []
    one_call_a_batch(worker)
    worker.connector.shutdown()


def stored_blocks(group, tokens: int, chunk: int, first: int) -> np.ndarray:
    """A request's block table, ids scattered from `first` on: of what has left a window only what was stored before."""
    table = np.full(tokens // group.block_size, -1, np.int64)
    kept = [start // group.block_size + block for start in range(0, tokens, chunk) for block in group.rules.keep(chunk)]
    table[kept] = first + np.random.default_rng(first).permutation(len(kept))
    return table

"""What workers of one tensor and pipeline size stored, workers of any other load: every byte, and none beside them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.boxes import Box
from layerflow.errors import ExtentError
from layerflow.ops.copier import CpuCopier
from layerflow.ops.covered import ChunkPlaces, CoveredBlocks

from .cluster import Model, Stored, Worker, check_loaded, covered, workers

HEADS = [0, 1, 2, 4, 6, 8]


def stages(size: int, seed: int, layers: int) -> list[int]:
    """Uneven stages: where each but the last ends."""
    return sorted(np.random.default_rng(seed).permutation(np.arange(1, layers))[: size - 1].tolist())


def load_all(model: Model, writers: list[Worker], readers: list[Worker]) -> None:
    for writer in writers:
        writer.fill()
    stored = Stored(model, writers)
    for reader in readers:
        before = reader.image()
        blocks = covered(reader, stored)
        for layer in reader.layers:
            CpuCopier(stored.arena).load(blocks.extents(layer, 0, len(blocks)))
        check_loaded(reader, before)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("writing", range(1, 9))
def test_all_tensor_sizes_read_each_other(heads: int, writing: int) -> None:
    """Each pair of tensor sizes, with some pair of pipeline sizes."""
    model = Model(heads)
    for reading in range(1, 9):
        pp_writing, pp_reading = 1 + (writing + reading + heads) % 4, 1 + (writing * 3 + reading) % 4
        writers = workers(model, writing, stages(pp_writing, writing, model.layers), 1)
        readers = workers(model, reading, stages(pp_reading, reading + 8, model.layers), 2)
        load_all(model, writers, readers)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    tp=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    pp=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layers=st.integers(4, 9),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_all_pipeline_sizes_read_each_other(
    heads: int, tp: tuple[int, int], pp: tuple[int, int], layers: int, chunks: list[int], seed: int
) -> None:
    model = Model(heads, layers, chunks=tuple(chunks))
    writers, readers = (
        workers(model, size, stages(parts, seed + n, layers), seed + n)
        for n, (size, parts) in enumerate(zip(tp, pp, strict=True))
    )
    load_all(model, writers, readers)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    tp=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    pp=st.integers(1, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_batches_of_blocks_layers_and_bytes_add_up(
    heads: int, tp: tuple[int, int], pp: int, seed: int, data: st.DataObject
) -> None:
    model = Model(heads)
    writers = workers(model, tp[0], stages(pp, seed, model.layers), seed)
    for writer in writers:
        writer.fill()
    stored = Stored(model, writers)
    reader = workers(model, tp[1], [], seed + 1)[data.draw(st.integers(0, tp[1] - 1))]
    before, blocks, copier = reader.image(), covered(reader, stored), CpuCopier(stored.arena)
    cut = data.draw(st.integers(0, len(blocks)))
    alike = [layer for layer in reader.layers if blocks.shapes[layer] == blocks.shapes[reader.layers[0]]]
    size = reader.memory.block_bytes(0)
    together = blocks.layers(alike, 0, cut)
    assert together.total == together.nbytes.sum() == size * cut * len(alike)
    copier.load(together)
    for layer in reader.layers:
        if layer not in alike:
            copier.load(blocks.extents(layer, 0, cut))
        for block in range(cut, len(blocks)):
            at = sorted({0, size, *data.draw(st.lists(st.integers(1, size), max_size=3))})
            parts = [blocks.extents(layer, block, block + 1, lo, hi) for lo, hi in itertools.pairwise(at)]
            assert [part.total for part in parts] == [hi - lo for lo, hi in itertools.pairwise(at)]
            for part in parts:
                copier.load(part)
    check_loaded(reader, before)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=3, unique=True),
    reading=st.integers(1, 8),
    data=st.data(),
)
def test_chunks_of_several_partitions_make_one_load(
    heads: int, sizes: list[int], reading: int, data: st.DataObject
) -> None:
    """Chunks stored by other sizes each, or by several at once with some objects gone: whole, or refused by name."""
    model = Model(heads)
    writers = [worker for size in sizes for worker in workers(model, size, [], 1)]
    for writer in writers:
        writer.fill()
    stored = Stored(model, writers)
    for places in stored.places:
        kept = data.draw(st.lists(st.sampled_from(places), unique=True, min_size=0, max_size=len(places)))
        places[:] = [place for place in places if place in kept]
    for reader in workers(model, reading, [], 2):
        lacks = [
            (layer, head)
            for places in stored.places
            for layer in range(reader.box.first_layer, reader.box.end_layer)
            for head in range(reader.box.first_head, reader.box.end_head)
            if not any(box.encloses(Box(layer, layer + 1, head, head + 1)) for box, _ in places)
        ]
        if lacks:
            with pytest.raises(ExtentError, match="nothing stored has layers"):
                covered(reader, stored)
            continue
        before, blocks = reader.image(), covered(reader, stored)
        for layer in reader.layers:
            CpuCopier(stored.arena).load(blocks.extents(layer, 0, len(blocks)))
        check_loaded(reader, before)


def test_replicas_and_planes_without_heads_are_stored_once() -> None:
    for heads, tp, boxes in ((0, 4, 1), (1, 8, 1), (2, 8, 2), (6, 8, 6), (8, 2, 2)):
        stored = Stored(Model(heads), workers(Model(heads), tp, [], 1))
        assert [len(places) for places in stored.places] == [boxes] * 3
        assert all(len({box for box, _ in places}) == boxes for places in stored.places)


def one() -> tuple[Worker, Stored]:
    model = Model(4)
    stored = Stored(model, workers(model, 2, [], 1))
    return workers(model, 1, [], 2)[0], stored


def test_what_is_missing_is_named() -> None:
    reader, stored = one()
    stored.places[1].pop()
    with pytest.raises(ExtentError, match="chunk 1 of the load: nothing stored has layers 0 to 2, heads 2 to 3"):
        covered(reader, stored)


def test_ranges_outside_are_refused() -> None:
    reader, stored = one()
    blocks = covered(reader, stored)
    with pytest.raises(ExtentError, match="outside the list of 5"):
        blocks.extents(0, 0, 6)
    with pytest.raises(ExtentError, match="layer 1 is not in group 0"):
        blocks.extents(1, 0, 1)
    with pytest.raises(ExtentError, match="is of one block"):
        blocks.extents(0, 0, 2, 0, 1)
    with pytest.raises(ExtentError, match="range within one block"):
        blocks.extents(0, 0, 1, 0, reader.memory.block_bytes(0) + 1)


def test_objects_outside_the_arena_are_refused() -> None:
    reader, stored = one()
    chunk, held, index = reader.columns()
    lists = (reader.ids, chunk, held, index)
    end = stored.arena.nbytes
    with pytest.raises(ExtentError, match="is outside the arena"):
        CoveredBlocks(reader.memory, 0, lambda _: end - 1, reader.box, stored.chunks(), *lists)
    bad = [ChunkPlaces(boxes, tuple(at + 2**40 for at in offsets)) for boxes, offsets in stored.chunks()]
    with pytest.raises(ExtentError, match="is outside the arena"):
        CoveredBlocks(reader.memory, 0, lambda _: end, reader.box, bad, *lists)
    with pytest.raises(ExtentError, match="each block's chunk must be one of 3"):
        CoveredBlocks(reader.memory, 0, lambda _: end, reader.box, stored.chunks(), reader.ids, chunk + 1, held, index)


def test_a_box_that_is_not_the_memorys_is_refused() -> None:
    reader, stored = one()
    chunk, held, index = reader.columns()
    for box in (reader.box._replace(end_layer=2), reader.box._replace(end_head=3)):
        with pytest.raises(ExtentError, match="cannot be the worker's box"):
            CoveredBlocks(
                reader.memory, 0, lambda _: stored.arena.nbytes, box, stored.chunks(), reader.ids, chunk, held, index
            )

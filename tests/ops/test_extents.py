"""Block lists: coalescing, byte parts, and bounds that are checked before anything moves."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from layerflow.device import CpuEvent, device_for
from layerflow.errors import ExtentError, InvalidTransition
from layerflow.objects import HEADER_BYTES, object_bytes
from layerflow.ops.copier import copier_for, copy_fallback, copy_native, warn_of_fallback
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane

from .layouts import GUARD, FlatArena

BLOCKS, BLOCK_SIZE = 64, 4
MLA = (
    Plane("latent", "bfloat16", (16,)),
    Plane("rope", "bfloat16", (4,)),
    Plane("indexer", "int8", (8,)),
    Plane("scale", "float16", (1,)),
)
GROUP = GroupSpec("mla", BLOCK_SIZE, (0, 2), MLA)
OTHER = GroupSpec("full", BLOCK_SIZE, (1,), (Plane("k", "float32", (3,)), Plane("v", "float32", (3,))))
SPEC = ModelSpec("m", "c", (GROUP, OTHER), chunk_tokens=16)
PER_OBJECT = 4  # blocks
OBJECT = object_bytes(GROUP, PER_OBJECT)


def paged() -> PagedMemory:
    return PagedMemory(
        SPEC,
        {
            layer: {
                plane.name: torch.zeros(BLOCKS, BLOCK_SIZE, *plane.shape, dtype=getattr(torch, plane.dtype))
                for plane in SPEC.groups[group].planes
            }
            for layer, (group, _) in enumerate(SPEC.layer_places())
        },
    )


def vector(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def block_list(memory: PagedMemory, engine_blocks: np.ndarray, arena_bytes: int = 16 * OBJECT) -> BlockList:
    """Full objects one after the other from the arena's start."""
    n = np.arange(engine_blocks.size, dtype=np.int64)
    held = np.full(n.size, PER_OBJECT, np.int64)
    return BlockList(memory, 0, arena_bytes, engine_blocks, n // PER_OBJECT * OBJECT, held, n % PER_OBJECT)


def test_a_run_in_both_memories_is_one_extent_per_plane() -> None:
    memory = paged()
    part = block_list(memory, np.arange(10, 18)).extents(2, 0, 8)
    assert part.nbytes.tolist() == [PER_OBJECT * BLOCK_SIZE * plane.token_bytes for plane in MLA for _ in range(2)]
    assert part.total == 8 * GROUP.bytes_per_block
    layer_at = HEADER_BYTES + PER_OBJECT * GROUP.bytes_per_block
    assert part.arena[:2].tolist() == [layer_at, OBJECT + layer_at]
    assert part.engine[0] == memory.planes(2)[0].base + 10 * MLA[0].token_bytes * BLOCK_SIZE


def test_runs_break_where_either_memory_breaks() -> None:
    blocks = block_list(paged(), vector(3, 4, 7, 8, 9, 10, 20, 21))  # objects of 4: 3 4 7 8 | 9 10 20 21
    sizes = blocks.extents(0, 0, 8).nbytes[:4] // (BLOCK_SIZE * MLA[0].token_bytes)
    assert sizes.tolist() == [2, 2, 2, 2]
    within = blocks.extents(0, 1, 6)
    assert (within.nbytes[:3] // (BLOCK_SIZE * MLA[0].token_bytes)).tolist() == [1, 2, 2]
    assert within.total == within.nbytes.sum() == 5 * GROUP.bytes_per_block


def test_scattered_blocks_stay_apart_and_descending_ones_too() -> None:
    part = block_list(paged(), vector(9, 8, 7, 6)).extents(0, 0, 4)
    assert part.nbytes.size == 4 * len(MLA)


def test_nothing_to_move_is_no_extent() -> None:
    part = block_list(paged(), vector(5, 6)).extents(0, 1, 1)
    assert part.total == part.arena.size == part.engine.size == part.nbytes.size == 0


def test_bytes_of_one_block_cross_planes() -> None:
    memory = paged()
    blocks = block_list(memory, vector(5, 6))
    latent = MLA[0].token_bytes * BLOCK_SIZE
    part = blocks.extents(0, 1, 2, latent - 3, latent + 5)
    assert part.nbytes.tolist() == [3, 5]
    assert part.engine.tolist() == [memory.planes(0)[0].base + 7 * latent - 3, memory.planes(0)[1].base + 6 * 32]
    assert part.arena.tolist() == [HEADER_BYTES + 2 * latent - 3, HEADER_BYTES + 4 * latent + 32]


@pytest.mark.parametrize(
    ("engine_blocks", "offsets", "held", "index", "words"),
    [
        (vector(0, BLOCKS), vector(0, 0), vector(4, 4), vector(0, 1), r"block 1 of the list: engine block 64"),
        (vector(-1, 0), vector(0, 0), vector(4, 4), vector(0, 1), r"block 0 of the list: engine block -1"),
        (vector(0, 1), vector(0, OBJECT + 1), vector(4, 4), vector(0, 1), r"block 1 .* 4 blocks at offset"),
        (vector(0, 1), vector(0, -64), vector(4, 4), vector(0, 1), r"block 1 .* at offset -64"),
        (vector(0, 1), vector(0, 0), vector(4, 2**61), vector(0, 1), r"block 1 .* object of 2305843009213693952"),
        (vector(0, 1), vector(0, 2**63 - 1), vector(4, 4), vector(0, 1), r"block 1 .* at offset 9223372036854775807"),
        (vector(0, 1), vector(0, 0), vector(4, 0), vector(0, 0), r"block 1 .* object of 0 blocks"),
        (vector(0, 1), vector(0, 0), vector(4, 4), vector(0, 4), r"block 1 .* position 4 is outside"),
        (vector(0, 1), vector(0, 0), vector(4, 4), vector(-1, 0), r"block 0 .* position -1 is outside"),
        (vector(0, 1), vector(0), vector(4, 4), vector(0, 0), "one length"),
        (vector(0, 1).astype(np.int32), vector(0, 0), vector(4, 4), vector(0, 0), "int64 vectors"),
    ],
)
def test_what_lies_outside_is_refused_by_its_first_block(
    engine_blocks: np.ndarray, offsets: np.ndarray, held: np.ndarray, index: np.ndarray, words: str
) -> None:
    with pytest.raises(ExtentError, match=words):
        BlockList(paged(), 0, 2 * OBJECT, engine_blocks, offsets, held, index)


def test_an_object_that_ends_with_the_arena_is_inside() -> None:
    blocks = BlockList(paged(), 0, 2 * OBJECT, vector(0), vector(OBJECT), vector(4), vector(3))
    part = blocks.extents(2, 0, 1)
    assert part.arena[-1] + part.nbytes[-1] == 2 * OBJECT


def test_an_arena_smaller_than_a_header_holds_nothing() -> None:
    with pytest.raises(ExtentError, match="outside the arena"):
        BlockList(paged(), 0, 10, vector(0), vector(0), vector(1), vector(0))


@pytest.mark.parametrize(
    ("layer", "lo", "hi", "byte_lo", "byte_hi"),
    [
        (1, 0, 1, 0, 0),
        (3, 0, 1, 0, 0),
        (-1, 0, 1, 0, 0),
        (0, 0, 3, 0, 0),
        (0, -1, 1, 0, 0),
        (0, 2, 1, 0, 0),
        (0, 0, 2, 0, 8),
        (0, 0, 1, 8, 8),
        (0, 0, 1, 8, 0),
        (0, 0, 1, -1, 8),
        (0, 0, 1, 0, GROUP.bytes_per_block + 1),
    ],
)
def test_ranges_outside_the_list_are_refused(layer: int, lo: int, hi: int, byte_lo: int, byte_hi: int) -> None:
    with pytest.raises(ExtentError):
        block_list(paged(), vector(5, 6)).extents(layer, lo, hi, byte_lo, byte_hi)


def test_later_changes_of_the_callers_arrays_change_nothing() -> None:
    ids = vector(5, 6)
    blocks = block_list(paged(), ids)
    before = blocks.extents(0, 0, 2)
    ids[:] = 10_000
    np.testing.assert_array_equal(blocks.extents(0, 0, 2).engine, before.engine)


def test_a_copy_before_its_event_is_refused_and_moves_nothing() -> None:
    memory, arena, event = paged(), FlatArena(16 * OBJECT), CpuEvent()
    part = block_list(memory, vector(5, 6)).extents(0, 0, 2)
    copier = copier_for(memory, arena, device_for("cpu"))
    for call in (copier.load, copier.save):
        with pytest.raises(InvalidTransition, match="before the event"):
            call(part, after=event)
    assert (arena.array == GUARD).all()
    event.set()
    assert copier.load(part, after=event) is None
    assert any((region.bytes == GUARD).any() for region in memory.regions())


def test_without_the_c_extension_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerflow.ops.copier.copy_native", None)
    warn_of_fallback.cache_clear()
    with capture_logs() as logs:
        for _ in range(2):
            copier_for(paged(), FlatArena(OBJECT), device_for("cpu"))
    assert logs == [{"event": "copy_loop_not_built", "log_level": "warning"}]


@pytest.mark.skipif(copy_native is None, reason="the C extension is not built here")
@pytest.mark.parametrize("shift", [0, 1, 7, 16, 33])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 2047, 2048, 2049, 4096 + 17, 100_003])
def test_native_and_fallback_copy_the_same_bytes(shift: int, size: int) -> None:
    assert copy_native is not None
    rng = np.random.default_rng(size)
    count = 3
    source = rng.integers(0, 256, (size + 64) * count + 64, dtype=np.uint8)
    results = []
    for copy in (copy_native, copy_fallback):
        target = np.full(source.size, GUARD, np.uint8)
        at = np.arange(count, dtype=np.int64)[::-1] * (size + 64) + shift
        copy(
            target.ctypes.data,
            source.ctypes.data,
            at,
            np.arange(count, dtype=np.int64) * (size + 64) + 5,
            at * 0 + size,
        )
        results.append(target)
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0][shift : shift + size] == source[2 * (size + 64) + 5 :][:size]).all()


@pytest.mark.skipif(copy_native is None, reason="the C extension is not built here")
@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 70_000), st.sampled_from([2048, 8192, 1 << 14, 1 << 16, 1 << 17, (1 << 18) + 64])),
        min_size=1,
        max_size=4,
    ),
    into=st.integers(0, 4200),
    out_of=st.integers(0, 4200),
)
def test_every_byte_is_copied_wherever_source_and_destination_lie(sizes: list[int], into: int, out_of: int) -> None:
    assert copy_native is not None
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    source = np.random.default_rng(0).integers(0, 256, out_of + sum(sizes), dtype=np.uint8)
    target = np.full(into + sum(sizes) + 64, GUARD, np.uint8)
    copy_native(target.ctypes.data, source.ctypes.data, starts + into, starts + out_of, vector(*sizes))
    assert (target[into : into + sum(sizes)] == source[out_of:]).all()
    assert (target[:into] == GUARD).all() and (target[into + sum(sizes) :] == GUARD).all()


@pytest.mark.skipif(copy_native is None, reason="the C extension is not built here")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="copied in one piece here")
@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 15, 1 << 16, 1 << 18, 1 << 20, (1 << 16) - 64, 48 << 10, 20 << 10])
def test_no_stretch_of_a_copy_loads_where_the_low_bits_are_those_of_anothers_stores(nbytes: int) -> None:
    from layerflow.ops._copy import stretch_bytes

    for distance in range(-4096, 4096, 16):
        length = stretch_bytes(nbytes, distance % (1 << 64))
        assert length % 64 == 0 and 4 * length <= nbytes <= 4 * length + 4 * 33 * 64, "the rest is a small one"
        for apart in (-3, -2, -1, 1, 2, 3):
            behind = (distance + apart * length) % 4096
            assert 256 <= behind <= 4096 - 64, (distance, length, apart)


@pytest.mark.skipif(copy_native is None, reason="the C extension is not built here")
@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ((vector(0), vector(0), vector(-1)), ValueError),
        ((vector(0), vector(0, 1), vector(1)), ValueError),
        ((vector(0).astype(np.int32), vector(0), vector(1)), TypeError),
        ((vector(0).astype(np.float64), vector(0), vector(1)), TypeError),
        ((vector(0, 0, 0)[::2], vector(0, 0), vector(1, 1)), (BufferError, ValueError)),
        ((b"12345678", vector(0), vector(1)), TypeError),
    ],
)
def test_the_extension_refuses_what_is_not_three_equal_vectors(arrays: tuple[object, ...], error: type) -> None:
    assert copy_native is not None
    with pytest.raises(error):
        copy_native(0, 0, *arrays)  # type: ignore[arg-type]


def test_objects_may_lie_in_memory_of_their_own() -> None:
    pool = 1 << 45
    offsets = vector(pool, pool + (1 << 30))
    blocks = BlockList(paged(), 0, offsets + OBJECT, vector(0, 1), offsets, vector(4, 4), vector(0, 3))
    part = blocks.extents(2, 0, 2)
    assert part.arena.min() > pool
    assert part.arena[-1] + part.nbytes[-1] == pool + (1 << 30) + OBJECT
    with pytest.raises(ExtentError, match=r"block 1 .* object of 4 blocks"):
        BlockList(paged(), 0, offsets + OBJECT - vector(0, 1), vector(0, 1), offsets, vector(4, 4), vector(0, 3))

"""Saving and loading move exactly the right bytes, for any strides, planes and groups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.ops.copier import CpuCopier, copy_native
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory

from .layouts import Case, FlatArena, cases, peek, raw_bytes

NATIVE = pytest.param(True, marks=pytest.mark.skipif(copy_native is None, reason="the C extension is not built here"))
both_ways = pytest.mark.parametrize("native", [NATIVE, False], ids=["native", "fallback"])


def fill(tensors: dict[int, dict[str, torch.Tensor]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for planes in tensors.values():
        for tensor in planes.values():
            raw = raw_bytes(tensor)
            raw[:] = rng.integers(0, 256, raw.size, dtype=np.uint8)


def snapshot(case: Case) -> list[np.ndarray]:
    return [raw_bytes(tensor).copy() for planes in case.tensors.values() for tensor in planes.values()]


@both_ways
@settings(max_examples=80, deadline=None)
@given(case=cases(), seed=st.integers(0, 99), data=st.data())
def test_save_then_load_moves_exactly_the_blocks(native: bool, case: Case, seed: int, data: st.DataObject) -> None:
    memory = PagedMemory(case.spec, case.tensors)
    arena = FlatArena(case.arena_bytes)
    blocks = BlockList(memory, case.group, arena.nbytes, *case.lists)
    copier = CpuCopier(arena, native)
    total = case.engine_blocks.size
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    layers = case.spec.groups[case.group].layers

    fill(case.tensors, seed)
    expected_arena = arena.array.copy()
    for layer in layers:
        for block in range(lo, hi):
            for offset, address in case.reference(layer, block):
                expected_arena[offset] = peek([address])[0]
        copier.save(blocks.extents(layer, lo, hi))
    np.testing.assert_array_equal(arena.array, expected_arena)

    saved = snapshot(case)
    fill(case.tensors, seed + 1)
    scrambled = snapshot(case)
    for layer in layers:
        copier.load(blocks.extents(layer, lo, hi))
    np.testing.assert_array_equal(arena.array, expected_arena)
    restored = {address for layer in layers for block in range(lo, hi) for _, address in case.reference(layer, block)}
    tensors = [tensor for planes in case.tensors.values() for tensor in planes.values()]
    for tensor, before, noise in zip(tensors, saved, scrambled, strict=True):
        raw = raw_bytes(tensor)
        addresses = raw.ctypes.data + np.arange(raw.size)
        mine = np.isin(addresses, list(restored))
        np.testing.assert_array_equal(raw, np.where(mine, before, noise))


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_a_blocks_bytes_are_the_sum_of_its_parts(case: Case, data: st.DataObject) -> None:
    memory = PagedMemory(case.spec, case.tensors)
    blocks = BlockList(memory, case.group, case.arena_bytes, *case.lists)
    if not len(blocks):
        return
    block = data.draw(st.integers(0, len(blocks) - 1))
    layer = data.draw(st.sampled_from(case.spec.groups[case.group].layers))
    size = memory.block_bytes(layer)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(1, size), max_size=4))})
    pairs = []
    for low, high in itertools.pairwise(cuts):
        part = blocks.extents(layer, block, block + 1, low, high)
        assert part.total == high - low == part.nbytes.sum()
        for arena, engine, nbytes in zip(part.arena, part.engine, part.nbytes, strict=True):
            pairs += [(int(arena) + n, int(engine) + n) for n in range(nbytes)]
    assert pairs == case.reference(layer, block)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_whole_ranges_cover_each_byte_once(case: Case) -> None:
    memory = PagedMemory(case.spec, case.tensors)
    blocks = BlockList(memory, case.group, case.arena_bytes, *case.lists)
    for layer in case.spec.groups[case.group].layers:
        part = blocks.extents(layer, 0, len(blocks))
        pairs = [
            (int(arena) + n, int(engine) + n)
            for arena, engine, nbytes in zip(part.arena, part.engine, part.nbytes, strict=True)
            for n in range(nbytes)
        ]
        assert part.total == len(pairs)
        assert sorted(pairs) == sorted(pair for block in range(len(blocks)) for pair in case.reference(layer, block))

"""Several batches in one call: the same bytes as one by one, as far as the call has come when it is halted."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.errors import ExtentError
from layerflow.ops import copier as copiers
from layerflow.ops.base import CopyProgress
from layerflow.ops.copier import CpuCopier, copy_batches_native
from layerflow.ops.extents import BlockList, Extents, joined
from layerflow.ops.paged import PagedMemory

from .layouts import Case, FlatArena, cases, raw_bytes

needs_native = pytest.mark.skipif(copy_batches_native is None, reason="the C extension is not built here")
both_ways = pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])


class Field:
    """Memory, an arena, and the batches of all layers of the case's group, whole."""

    def __init__(self, case: Case, native: bool) -> None:
        self.case = case
        self.arena = FlatArena(case.arena_bytes)
        self.memory = PagedMemory(case.spec, case.tensors)
        self.layers = case.spec.groups[case.group].layers
        self.blocks = BlockList(self.memory, case.group, self.arena.nbytes, *case.lists)
        self.copier = CpuCopier(self.arena, native)
        for number, tensor in enumerate(tensor for planes in case.tensors.values() for tensor in planes.values()):
            raw = raw_bytes(tensor)
            raw[:] = np.random.default_rng(number).integers(0, 256, raw.size, dtype=np.uint8)

    def each(self) -> list[Extents]:
        return [self.blocks.extents(layer, 0, len(self.blocks)) for layer in self.layers]

    def together(self) -> tuple[Extents, Any]:
        each = self.each()
        return joined(each), np.cumsum([extents.nbytes.size for extents in each], dtype=np.int64)


@both_ways
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_same_bytes_as_one_by_one(native: bool, case: Case) -> None:
    field = Field(case, native)
    progress = CopyProgress(len(field.layers))
    assert field.copier.save_batches(*field.together(), progress) == len(field.layers)
    assert (np.diff(progress.completed_at) >= 0).all() and progress.completed_at[0] > 0
    saved = field.arena.array.copy()
    field.arena.array[:] = 0xA5
    for extents in field.each():
        field.copier.save(extents)
    np.testing.assert_array_equal(field.arena.array, saved)

    tensors = [tensor for planes in case.tensors.values() for tensor in planes.values()]
    before = [raw_bytes(tensor).copy() for tensor in tensors]
    for extents in field.each():
        for address, nbytes in zip(extents.engine.tolist(), extents.nbytes.tolist(), strict=True):
            copiers.ctypes.memset(address, 0, nbytes)
    assert field.copier.load_batches(*field.together(), CopyProgress(len(field.layers))) == len(field.layers)
    for tensor, was in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(raw_bytes(tensor), was)


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_layers_that_lie_alike_have_the_extents_of_each(case: Case, data: st.DataObject) -> None:
    field = Field(case, native=False)
    lo = data.draw(st.integers(0, len(field.blocks)))
    hi = data.draw(st.integers(lo, len(field.blocks)))
    shapes = {layer: field.blocks.shapes[layer] for layer in field.layers}
    alike = [layer for layer in field.layers if shapes[layer] == shapes[field.layers[0]]]
    got, expected = field.blocks.layers(alike, lo, hi), joined([field.blocks.extents(at, lo, hi) for at in alike])
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    if len(alike) < len(field.layers):
        with pytest.raises(ExtentError, match="do not lie alike"):
            field.blocks.layers(field.layers, lo, hi)


@both_ways
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_halted_beforehand_nothing_is_touched(native: bool, case: Case) -> None:
    field = Field(case, native)
    before = field.arena.array.copy()
    progress = CopyProgress(len(field.layers))
    progress.halt()
    assert field.copier.save_batches(*field.together(), progress) == 0
    assert not progress.completed_at.any()
    np.testing.assert_array_equal(field.arena.array, before)


SIZE, COUNT = 1 << 20, 64


def ranges() -> tuple[np.ndarray, np.ndarray, Extents, Any]:
    """A source, a target, and batches of one extent each between them."""
    source, target = (np.full(SIZE * COUNT, value, np.uint8) for value in (7, 0))
    at = np.arange(COUNT, dtype=np.int64) * SIZE
    extents = Extents(at, at + source.ctypes.data, np.full(COUNT, SIZE, np.int64), SIZE * COUNT)
    return source, target, extents, np.arange(1, COUNT + 1, dtype=np.int64)


@needs_native
def test_halted_on_the_way_the_first_batches_are_whole_and_the_others_untouched() -> None:
    source, _, extents, ends = ranges()
    arena = FlatArena(source.size)
    arena.array[:] = 0
    progress = CopyProgress(COUNT)
    copied: list[int] = []
    lane = threading.Thread(target=lambda: copied.append(CpuCopier(arena).save_batches(extents, ends, progress)))
    lane.start()
    while not progress.completed_at[0]:
        os.sched_yield()
    progress.halt()
    lane.join()
    done = copied[0]
    assert 0 < done <= COUNT
    assert (progress.completed_at[:done] > 0).all() and not progress.completed_at[done:].any()
    assert (arena.array[: done * SIZE] == 7).all() and not arena.array[done * SIZE :].any()


def test_the_fallback_stops_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, extents, ends = ranges()
    arena = FlatArena(source.size)
    progress = CopyProgress(COUNT)
    copy = copiers.copy_fallback

    def copy_and_halt(*arguments: Any) -> None:
        copy(*arguments)
        progress.halt()

    monkeypatch.setattr(copiers, "copy_fallback", copy_and_halt)
    assert CpuCopier(arena, native=False).save_batches(extents, ends, progress) == 1
    assert progress.completed_at[0] and not progress.completed_at[1:].any()


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
@pytest.mark.parametrize("beside", ["itself", "its process", "nobody's", "negative"])
def test_a_thread_that_leaves_a_core_may_use_the_same_ones_afterwards(beside: str) -> None:
    source, _, extents, ends = ranges()
    arena = FlatArena(source.size)
    found: list[Any] = []

    def lane() -> None:
        # The thread itself is surely on its own core, so it leaves that where it can.
        names = {"itself": threading.get_native_id(), "its process": os.getpid(), "nobody's": 1 << 30, "negative": -5}
        before = os.sched_getaffinity(0)
        copied = CpuCopier(arena).save_batches(extents, ends, CopyProgress(COUNT), names[beside])
        found.append((copied, os.sched_getaffinity(0) == before))

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    assert found == [(COUNT, True)]
    assert (arena.array == 7).all()


@needs_native
@pytest.mark.skipif(not Path("/proc/thread-self/stat").exists(), reason="a thread's core is not told here")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other core")
def test_a_thread_leaves_the_core_of_the_one_it_is_beside() -> None:
    at = np.zeros(1, np.int64)
    source, arena = np.ones(1, np.uint8), FlatArena(1)
    extents, ends = Extents(at, at + source.ctypes.data, at + 1, 1), at + 1

    def core() -> str:
        return Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36]

    moved: list[bool] = []

    def lane() -> None:
        for _ in range(20):
            before = core()
            CpuCopier(arena).save_batches(extents, ends, CopyProgress(1), threading.get_native_id())
            moved.append(core() != before)

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    assert sum(moved) > 10


@needs_native
@pytest.mark.parametrize(
    ("ends", "landed", "halt", "error"),
    [
        (np.array([2, 1]), np.zeros(2), np.zeros(1, np.uint8), ValueError),
        (np.array([1, 3]), np.zeros(2), np.zeros(1, np.uint8), ValueError),
        (np.array([-1, 2]), np.zeros(2), np.zeros(1, np.uint8), ValueError),
        (np.array([1, 2]), np.zeros(1), np.zeros(1, np.uint8), ValueError),
        (np.array([1, 2]), np.zeros(2), np.zeros(0, np.uint8), ValueError),
        (np.array([1, 2], np.int32), np.zeros(2), np.zeros(1, np.uint8), TypeError),
        (np.array([1, 2]), b"0123456789abcdef", np.zeros(1, np.uint8), TypeError),
    ],
)
def test_the_extension_refuses_batches_that_cannot_be(ends: Any, landed: Any, halt: Any, error: type) -> None:
    assert copy_batches_native is not None
    target = np.zeros(2, np.uint8)
    at, one = np.arange(2, dtype=np.int64), np.ones(2, np.int64)
    with pytest.raises(error):
        copy_batches_native(target.ctypes.data, target.ctypes.data, at, at, one, ends, landed, halt, 0)


@pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])
@pytest.mark.parametrize("changes", [None, 0, 1, 2])
def test_a_call_ends_with_the_batch_behind_which_a_word_has_changed(native: bool, changes: int | None) -> None:
    """The words lie where the batches are copied to, so that each of them may change one."""
    if native and copy_batches_native is None:
        pytest.skip("the C extension is not built here")
    memory = np.zeros(64, np.uint8)
    memory[:24] = np.arange(24)  # three batches of eight bytes, copied behind the words
    words_at = np.array([32, 40], np.int64)
    words = np.array([0, 0], np.int64)
    target = memory.ctypes.data + np.array([48, 48, 48], np.int64)
    if changes == 0:
        words[1] = 5  # it is another before the first byte
    elif changes is not None:
        target[changes - 1] = memory.ctypes.data + 40

    class Arena:
        array, address, nbytes = memory, memory.ctypes.data, memory.nbytes

    copier = CpuCopier(Arena, native=native)  # type: ignore[arg-type]
    extents = Extents(np.arange(3, dtype=np.int64) * 8, target, np.full(3, 8, np.int64), 24)
    progress = CopyProgress(3)
    copied = copier.load_batches(extents, np.arange(1, 4, dtype=np.int64), progress, words=(words_at, words))
    assert copied == (3 if changes is None else max(changes - 1, 0))
    assert (progress.completed_at > 0).tolist() == [batch < copied for batch in range(3)]
    if changes == 0:
        assert not memory[48:].any(), "nothing was copied"

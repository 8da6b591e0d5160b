"""What is copied before its part of the arena is pinned goes through a pinned buffer, and loses no byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.simulated import Event, Machine
from device.test_streamed import Bench
from layerflow.device.accelerator import BatchCopied
from layerflow.device.base import CopyCounts
from layerflow.ops.bounced import BounceBuffer, cut, within_pieces
from layerflow.ops.copier import copy_fallback
from layerflow.ops.extents import Extents
from layerflow.system.memfd import SharedMemory

Ranges = list[tuple[int, int]]


def extents_of(ranges: Ranges) -> Extents:
    arena, nbytes = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    return Extents(arena, arena * 3 + 17, nbytes, int(nbytes.sum()))


def bytes_of(extents: Extents) -> list[tuple[int, int]]:
    """Every byte that is moved: from where to where."""
    return [
        (int(at) + n, int(to) + n)
        for at, to, size in zip(extents.arena, extents.engine, extents.nbytes, strict=True)
        for n in range(int(size))
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=12), st.integers(1, 64))
def test_no_range_lies_across_two_pieces_and_no_byte_is_lost(ranges: Ranges, piece: int) -> None:
    extents = extents_of(ranges)
    split = within_pieces(extents, extents.arena, piece)
    assert bytes_of(split) == bytes_of(extents)
    assert (split.arena // piece == (split.arena + split.nbytes - 1) // piece).all()
    assert split.total == extents.total


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=12), st.integers(1, 64))
def test_parts_fit_a_slot_and_no_byte_is_lost(ranges: Ranges, most: int) -> None:
    extents = extents_of(ranges)
    parts = list(cut(extents, most))
    assert [byte for part in parts for byte in bytes_of(part)] == bytes_of(extents)
    assert all(part.total == int(part.nbytes.sum()) <= most for part in parts)


@pytest.fixture
def bench(arena: SharedMemory) -> Bench:
    """Nothing of its arena is pinned; a batch takes more slots than there are."""
    bench = Bench(Machine(), arena, pinned=False)
    bench.copier._bounce = BounceBuffer(bench.device, arena, copy_fallback, slot_bytes=4096, slots=2)
    return bench


def test_bytes_come_back_as_they_were(bench: Bench) -> None:
    before = bench.engine_bytes()
    with bench.machine.running():
        saved = bench.copier.save(bench.extents)
        saved.synchronize()
        assert saved.query()
        bench.clear()
        bench.copier.load(bench.extents).synchronize()
    assert bench.engine_bytes() == before
    assert bench.machine.torn == []
    slots = -(-2 * 64 * 4 * 32 // 4096)
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2 * slots, bounced=2)


def test_a_saved_byte_is_in_the_arena_once_the_event_says_so_and_not_before(arena: SharedMemory) -> None:
    bench = Bench(Machine(), arena, pinned=False)
    before = bench.engine_bytes()
    saved = bench.copier.save(bench.extents)
    assert not saved.query()
    bench.machine.run()
    assert not arena.array.any(), "the host copies them on, when the event is asked"
    assert saved.query()
    bench.clear()
    bench.copier.load(bench.extents)
    bench.machine.run()
    assert bench.engine_bytes() == before


def test_a_drained_copier_writes_nothing_later(arena: SharedMemory) -> None:
    bench = Bench(Machine(), arena, pinned=False)
    saved = bench.copier.save(bench.extents)
    bench.copier.drain()
    assert arena.array.any()
    arena.array[:] = 7
    assert saved.query()
    assert (arena.array == 7).all(), "the server may have given the slots away by now"


def test_a_save_whose_second_part_is_refused_writes_nothing_later(arena: SharedMemory) -> None:
    machine = Machine()
    bench = Bench(machine, arena, pinned=False)
    bench.copier._bounce = BounceBuffer(bench.device, arena, copy_fallback, slot_bytes=1 << 13)
    calls, copy_batch = 0, machine.copy_batch

    def refuse_second(*call: Any) -> BatchCopied:
        nonlocal calls
        calls += 1
        return BatchCopied(999, 0) if calls == 2 else copy_batch(*call)

    machine.copy_batch = refuse_second  # type: ignore[method-assign]
    with machine.running():
        bench.copier.save(bench.extents).synchronize()
        assert calls == 2 and arena.array.any(), "range by range"
        arena.array[:] = 7  # its places are another object's
        bench.copier.drain()
    assert (arena.array == 7).all()


def test_a_load_reads_the_arena_when_it_is_submitted_and_waits_for_the_engine(bench: Bench) -> None:
    machine, before = bench.machine, bench.engine_bytes()
    with machine.running():
        bench.copier.save(bench.extents).synchronize()
    bench.clear()
    engine = machine.Stream()
    with machine.stream(engine):
        zeroing = engine.put(bench.clear, held=True)
        zeroed = bench.device.record()
    bench.copier._bounce = BounceBuffer(bench.device, bench.arena, copy_fallback, slot_bytes=1 << 16)
    loaded = bench.copier.load(bench.extents, after=zeroed)
    machine.run()
    assert not loaded.query()
    zeroing.held = False
    machine.run()
    assert loaded.query()
    assert bench.engine_bytes() == before


def test_a_device_that_fails_never_makes_a_save_look_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = True
    synchronize = Event.synchronize

    def broken(event: Event) -> None:
        if fails:
            raise RuntimeError("the device has failed")
        synchronize(event)

    monkeypatch.setattr(Event, "synchronize", broken)
    with pytest.raises(RuntimeError, match="the device has failed"):
        bench.copier.save(bench.extents)  # needs a slot back
    fails = False
    with bench.machine.running():
        bench.copier.drain()
        bench.copier.save(bench.extents).synchronize()


def test_part_of_a_pinned_arena_takes_the_straight_way(arena: SharedMemory) -> None:
    """As far as it is pinned by now; ranges across two pieces are cut, for the driver takes none of those."""
    machine = Machine()
    piece = 4096 + 100  # no block's multiple

    class Half:
        piece_bytes = piece
        pinned_bytes = 0

    bench = Bench(machine, arena, pinned=False, part=Half())
    before = bench.engine_bytes()
    for at in range(0, piece * 8, piece):
        assert bench.device.pin(arena.address + at, piece)
    Half.pinned_bytes = piece * 8
    assert int((bench.extents.arena + bench.extents.nbytes).max()) <= Half.pinned_bytes
    bench.copier.save(bench.extents)
    bench.machine.run()
    bench.clear()
    bench.copier.load(bench.extents)
    bench.machine.run()
    assert bench.engine_bytes() == before
    assert machine.torn == []
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2)
    for at in range(0, piece * 8, piece):
        bench.device.unpin(arena.address + at)

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.errors import PoolError
from layerflow.pool.slots import FreeRuns, Slots

MIB = 1 << 20


def breaks(offsets: list[int], stride: int) -> int:
    return sum(after - before != stride for before, after in pairwise(offsets))


def test_one_size_fills_the_arena_in_one_run():
    slots = Slots(64 * 4096)
    assert slots.alloc(4096, 100) == list(range(0, 64 * 4096, 4096))
    assert slots.alloc(1) == []


@pytest.mark.parametrize("nbytes", [64 + 100 * 1024, 64 + MIB, 64 + 3 * MIB + 7, 64 + 10 * MIB, 5000])
def test_little_is_wasted_whatever_the_size(nbytes):
    slots = Slots(1 << 30)
    offsets = slots.alloc(nbytes, 1 << 20)
    slots.validate()
    assert len(offsets) * nbytes > 0.9 * (1 << 30)
    assert breaks(offsets, slots.stride(nbytes)) <= (1 << 30) / max(4 * MIB, nbytes)


def test_a_batch_prefers_one_run_that_holds_it_over_scattered_holes():
    slots = Slots(1024 * 4096)
    offsets = slots.alloc(4096, 1024)
    for index in [3, 7, 11, *range(200, 208), 500]:
        slots.free(offsets[index])
    assert slots.alloc(4096, 8) == offsets[200:208]
    assert slots.alloc(4096, 4) == [offsets[index] for index in (3, 7, 11, 500)]


def test_a_batch_takes_the_shortest_run_that_holds_it():
    slots = Slots(1024 * 4096)
    offsets = slots.alloc(4096, 1024)
    for index in [*range(100, 108), *range(300, 304), *range(640, 660)]:
        slots.free(offsets[index])
    assert slots.alloc(4096, 4) == offsets[300:304]
    assert slots.alloc(4096, 7) == offsets[100:107]


def test_a_single_object_fills_a_hole_before_fresh_memory():
    slots = Slots(1024 * 4096)
    offsets = slots.alloc(1000, 20)
    slots.free(offsets[5])
    assert slots.alloc(1000) == [offsets[5]]


def test_an_emptied_extent_serves_another_size():
    slots = Slots(16 * 4096)
    small = slots.alloc(1024, 64)
    assert slots.alloc(16 * 4096) == []
    for offset in small:
        slots.free(offset)
    assert slots.alloc(16 * 4096) == [0]
    assert slots.statistics().classes == 1


def test_sizes_come_and_go_without_a_trace():
    slots = Slots(256 * 4096)
    for nbytes in range(1, 100_000, 997):
        for offset in slots.alloc(nbytes, 3):
            slots.free(offset)
    assert slots.statistics() == Slots(256 * 4096).statistics()


def test_strides_are_aligned():
    slots = Slots(1 << 20, alignment=4096)
    assert slots.alloc(100, 3) == [0, 4096, 8192]
    for alignment in (0, 48, 8192):
        with pytest.raises(PoolError):
            Slots(1 << 20, alignment=alignment)


def test_bad_calls_change_nothing():
    slots = Slots(1 << 20)
    [offset] = slots.alloc(5000)
    for wrong in (offset + 64, 1 << 30):
        with pytest.raises(PoolError):
            slots.free(wrong)
    slots.free(offset)
    with pytest.raises(PoolError, match="freed twice"):
        slots.free(offset)
    with pytest.raises(PoolError):
        slots.alloc(0)
    slots.validate()


def held(slots, offsets):
    """Only what lies at these offsets must stay."""
    for extent in slots.extents():
        extent.evictable = sum(offset not in offsets for offset in extent.offsets())


def test_window_is_the_cheapest_place_without_held_objects():
    slots = Slots(16 * 4096)
    offsets = slots.alloc(4096, 16)
    for index in (9, 10):
        slots.free(offsets[index])
    held(slots, [offsets[i] for i in (0, 4, 12)])
    assert slots.window(4 * 4096) in (offsets[7:9], [offsets[8], offsets[11]])
    held(slots, [offsets[i] for i in (0, 4, 8, 12)])
    assert slots.window(4 * 4096) is None
    held(slots, offsets[:9] + offsets[12:])
    assert slots.window(4096) == [offsets[11]]
    held(slots, [])
    assert len(slots.window(16 * 4096)) == 14


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_history_never_overlaps_and_returns_everything(data):
    granules = data.draw(st.integers(1, 80))
    slots = Slots(granules * 4096 + data.draw(st.integers(0, 4095)))
    fresh = slots.statistics()
    live: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if live and data.draw(st.booleans()):
            for offset in data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)):
                assert slots.free(offset) == slots.stride(live.pop(offset))
        else:
            nbytes = data.draw(st.sampled_from([64, 700, 4096, 5000, 9000, 30_000]) | st.integers(1, 100_000))
            count = data.draw(st.integers(1, 20))
            offsets = slots.alloc(nbytes, count)
            assert offsets == sorted(set(offsets)) and len(offsets) <= count
            if len(offsets) < count:  # refused only where really nothing that large is left
                assert slots.alloc(nbytes) == []
                assert slots.statistics().unassigned_bytes < fresh.capacity_bytes or nbytes > fresh.capacity_bytes
            live |= dict.fromkeys(offsets, nbytes)
        slots.validate()
        end = 0
        for offset, nbytes in sorted(live.items()):
            assert offset >= end and offset % 64 == 0
            end = offset + nbytes
        assert end <= slots.capacity_bytes
    for offset in live:
        slots.free(offset)
    assert slots.statistics() == fresh


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_window_once_emptied_always_fits(data):
    slots = Slots(40 * 4096)
    live: list[int] = []
    for nbytes in data.draw(st.lists(st.sampled_from([700, 4096, 9000, 20_000]), min_size=5, max_size=60)):
        live += slots.alloc(nbytes)
    for offset in data.draw(st.lists(st.sampled_from(live), unique=True)):
        slots.free(offset)
        live.remove(offset)
    stays = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
    wanted = data.draw(st.integers(1, 40 * 4096))
    if slots.alloc(wanted):
        return
    held(slots, stays)
    window = slots.window(wanted)
    if window is None:
        for offset in set(live) - set(stays):
            slots.free(offset)
        assert slots.stride(wanted) in (704, 4096, 9024, 20_032) or slots.alloc(wanted) == []
        return
    assert set(window).isdisjoint(stays)
    for offset in window:
        slots.free(offset)
    assert len(slots.alloc(wanted)) == 1
    slots.validate()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100)), max_size=60))
def test_free_runs_against_a_bitmap(operations):
    runs, taken, free = FreeRuns(40), [], [True] * 40
    for give, length, pick in operations:
        if give and taken:
            start, had = taken.pop(pick % len(taken))
            runs.give(start, had)
            free[start : start + had] = [True] * had
        else:
            start = runs.take(length)
            first = next((i for i in range(41 - length) if all(free[i : i + length])), None)
            assert start == first
            if start is not None:
                taken.append((start, length))
                free[start : start + length] = [False] * length
        runs.validate()
        assert runs.free == sum(free)

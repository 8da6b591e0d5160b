"""Batches: caps, splits, dead parts, seals."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, of, submits
from hypothesis import given
from hypothesis import strategies as st

from layerflow.flow.commands import LoadsDone, Seal
from layerflow.flow.events import Limits, LimitsChanged, Part, RequestAborted
from layerflow.flow.graph import common, joined, touches, without


def ranges(commands, layer=None, direction=LOAD):
    return [(s.lo, s.hi) for s in submits(commands, direction) if layer in (None, s.layer)]


def test_one_batch_carries_many_requests():
    world = World()
    world.open_session(0, [(0, 10)] * 3)
    out = submits(world.open(0, 1, [Part(f"r{i}", 0, 2) for i in range(50)]))
    assert [(s.layer, s.lo, s.hi, s.nbytes, s.seals) for s in out] == [(i, 0, 100, 1000, True) for i in range(3)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(max_transfer_blocks=4), [(0, 4), (4, 8), (8, 10)]),
        (Limits(max_transfer_bytes=35), [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (Limits(max_transfer_blocks=100, max_transfer_bytes=100), [(0, 10)]),
    ],
)
def test_caps_split_and_only_the_last_batch_seals(limits, expected):
    world = World(limits)
    world.open_session(0, [(0, 10)])
    out = submits(world.open(0, 1, [Part("a", 0, 7), Part("b", 0, 3)]))
    assert [(s.lo, s.hi) for s in out] == expected
    assert [s.seals for s in out] == [False] * (len(expected) - 1) + [True]


def test_a_block_larger_than_the_cap_is_split_by_bytes():
    world = World(Limits(max_transfer_bytes=40))
    world.open_session(0, [(0, 100), (0, 20)])
    out = submits(world.open(0, 1, [Part("a", 0, 2)]))
    assert [(s.lo, s.hi, s.byte_lo, s.byte_hi) for s in out if s.layer == 0] == [
        (block, block + 1, lo, hi) for block in (0, 1) for lo, hi in ((0, 40), (40, 80), (80, 100))
    ]
    assert [(s.lo, s.hi, s.byte_lo, s.byte_hi) for s in out if s.layer == 1] == [(0, 2, 0, 0)]
    world.drain()


def test_a_cap_raised_within_a_block_finishes_the_block_first():
    world = World(Limits(max_transfer_bytes=40, max_granted_bytes=80))
    world.open_session(0, [(0, 100)])
    first = submits(world.open(0, 1, [Part("a", 0, 3)]))
    assert [(s.byte_lo, s.byte_hi) for s in first] == [(0, 40), (40, 80)]
    rest = submits(world.send(LimitsChanged(Limits())))
    assert [(s.lo, s.hi, s.byte_lo, s.byte_hi) for s in rest] == [(0, 1, 80, 100), (1, 3, 0, 0)]


def test_a_block_that_dies_half_carved_leaves_the_next_one_whole():
    world = World(Limits(max_transfer_bytes=40, max_granted_bytes=80))
    world.open_session(0, [(0, 100)])
    first = submits(world.open(0, 1, [Part("a", 0, 1), Part("b", 0, 1)]))
    assert [(s.lo, s.byte_lo, s.byte_hi) for s in first] == [(0, 0, 40), (0, 40, 80)]
    world.send(RequestAborted(0, "a"))
    assert [(s.lo, s.byte_lo, s.byte_hi) for s in submits(world.done(first[0]))] == [(1, 0, 40)]
    world.drain()


def test_groups_have_their_own_numbers_and_layers():
    world = World()
    world.open_session(0, [(0, 10), (1, 4), (0, 10)])
    out = submits(world.open(0, 1, [Part("a", 1, 3), Part("a", 0, 2), Part("b", 1, 5)]))
    assert [(s.layer, s.lo, s.hi) for s in out] == [(0, 0, 2), (1, 0, 8), (2, 0, 2)]


def test_layers_of_a_group_without_parts_are_not_sealed():
    world = World()
    world.open_session(0, [(0, 10), (1, 4)])
    out = world.open(0, 1, [Part("a", 1, 3)])
    assert {s.layer for s in submits(out) if s.seals} == {1} and not of(out, Seal)


def test_a_dead_part_in_the_middle_splits_the_range():
    world = World(Limits(max_granted_bytes=139))
    world.open_session(0, [(0, 10)] * 2)
    world.open(0, 1, [Part("a", 0, 2), Part("b", 0, 3), Part("c", 0, 2)])
    out = submits(world.send(RequestAborted(0, "b")))
    assert [(s.lo, s.hi, s.seals) for s in out] == [(0, 2, False), (5, 7, True)]


def test_a_layer_whose_rest_dies_is_sealed_by_command():
    world = World(Limits(max_transfer_blocks=2, max_granted_bytes=40))
    world.open_session(0, [(0, 10)])
    (first, second) = submits(world.open(0, 1, [Part("a", 0, 4), Part("b", 0, 4)]))
    assert not first.seals and not second.seals
    assert [c.layer for c in of(world.send(RequestAborted(0, "b")), Seal)] == [0]
    world.done(first)
    assert of(world.done(second), LoadsDone)


def test_save_batches_are_handed_out_ahead_in_layer_order():
    world = World()
    world.open_session(0, [(0, 10)] * 3)
    out = submits(world.open(0, 1, (), [Part("a", 0, 2)]), SAVE)
    assert [(s.layer, s.seals, s.gate) for s in out] == [(i, True, i) for i in range(3)]


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6).map(
    lambda pairs: joined((lo, lo + n) for lo, n in pairs)
)


@given(spans, spans, st.integers(0, 35), st.integers(1, 5))
def test_spans_are_sets_of_blocks(one, other, lo, n):
    def blocks(spans):
        return {block for start, end in spans for block in range(start, end)}

    assert blocks(without(one, other)) == blocks(one) - blocks(other)
    assert blocks(common(one, other)) == blocks(one) & blocks(other)
    assert touches(one, lo, lo + n) == bool(blocks(one) & set(range(lo, lo + n)))
    assert without(one, other) == sorted(without(one, other))

"""Loads whose objects arrive layer by layer: carved as far as they are there, whole when they are lost."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, of, submits

from layerflow.flow.commands import Commit, LoadFailed, LoadsDone, Revoke, Seal, StepDone
from layerflow.flow.events import (
    FetchFailed,
    FrontierReached,
    LayersComputed,
    Limits,
    LimitsChanged,
    LoadsFenced,
    Part,
    SessionLost,
    StepClosed,
    Tick,
)


def carved(commands):
    return [(s.layer, s.lo, s.hi, s.seals) for s in submits(commands, LOAD)]


def failed(commands):
    return [(c.request, c.lo, c.hi, c.reason) for c in of(commands, LoadFailed)]


def one_session(layers=3, limits=None):
    world = World(limits)
    world.open_session(0, [(0, 10)] * layers)
    return world


def queued(world):
    return [session.number for session in world.flow._state.rings[LOAD].queue]


def test_layers_are_carved_as_they_arrive_and_seal_with_the_slowest():
    world = one_session()
    out = world.open(0, 1, [Part("a", 0, 2), Part("b", 0, 3, fetch=7), Part("c", 0, 2)])
    assert carved(out) == [(i, lo, hi, False) for i in range(3) for lo, hi in ((0, 2), (5, 7))]
    assert carved(world.fetched(0, 1, 7, 1)) == [(0, 2, 5, True)]
    assert carved(world.fetched(0, 1, 7, 3)) == [(1, 2, 5, True), (2, 2, 5, True)]
    world.drain()


def test_news_that_repeats_or_falls_behind_is_late_and_takes_nothing_back():
    world = one_session()
    world.open(0, 1, [Part("a", 0, 1, fetch=1)])
    world.fetched(0, 1, 1, 2)
    assert [world.fetched(0, 1, 1, layers) for layers in (2, 1, 0)] == [[], [], []]
    assert world.flow.statistics().late_reports == 3
    assert carved(world.fetched(0, 1, 1, 3)) == [(2, 0, 1, True)]
    world.drain()


def test_parts_that_share_an_arrival_go_in_one_batch():
    world = one_session(2)
    assert not submits(
        world.open(0, 1, [Part("a", 0, 2, 1), Part("b", 0, 1, 2), Part("c", 0, 2, 1), Part("d", 0, 1, 1)])
    )
    assert carved(world.fetched(0, 1, 1, 1)) == [(0, 0, 2, False), (0, 3, 6, False)]
    assert carved(world.fetched(0, 1, 2, 2)) == [(0, 2, 3, True), (1, 2, 3, False)]
    assert carved(world.fetched(0, 1, 1, 2)) == [(1, 0, 2, False), (1, 3, 6, True)]
    world.drain()


def test_groups_that_share_an_arrival_rise_on_their_own():
    world = World()
    world.open_session(0, [(0, 10), (1, 4), (0, 10)])
    world.open(0, 1, [Part("a", 0, 1, 3), Part("a", 1, 2, 3)])
    assert carved(world.fetched(0, 1, 3, 1, group=1)) == [(1, 0, 2, True)]
    assert carved(world.fetched(0, 1, 3, 2)) == [(0, 0, 1, True), (2, 0, 1, True)]
    world.drain()


def test_numbers_mean_something_within_their_step_only():
    world = one_session(1)
    world.open(0, 1, [Part("a", 0, 1, 1)])
    world.open(0, 2, [Part("b", 0, 1, 1)])
    (batch,) = submits(world.fetched(0, 2, 1, 1))
    assert batch.step == 2
    world.drain()


def test_arrivals_complete_before_anything_moved_join_one_batch():
    world = one_session(2, Limits(max_inflight_bytes=200, max_transfer_bytes=200))
    world.open_session(1, [(0, 10)] * 3)
    world.open(1, 1, [Part("busy", 0, 10)])
    world.open(0, 1, [Part(f"r{i}", 0, 2, fetch=i + 1) for i in range(4)])
    for part in (2, 0, 3, 1):
        assert not submits(world.fetched(0, 1, part + 1, 2))
    seen = []
    while world.flying:
        seen += [s[:3] for s in carved(world.done(next(iter(world.flying.values()))))]
    assert seen[-2:] == [(0, 0, 8), (1, 0, 8)]


def test_a_late_arrival_merges_where_it_catches_up():
    world = one_session(4, Limits(max_inflight_bytes=60, max_transfer_bytes=30))
    world.open(0, 1, [Part("a", 0, 2), Part("b", 0, 3, fetch=1)])
    world.fetched(0, 1, 1, 4)
    seen = []
    while world.flying:
        seen += [s[:3] for s in carved(world.done(next(iter(world.flying.values()))))]
    assert seen == [(0, 2, 5), (1, 2, 5), (2, 2, 5), (3, 0, 3), (3, 3, 5)]
    world.drain()


def test_an_arrival_that_lacks_layers_stays_apart_and_holds_up_no_other():
    world = one_session(4, Limits(max_inflight_bytes=120, max_transfer_bytes=30))
    world.open(0, 1, [Part("a", 0, 2), Part("b", 0, 3, fetch=1)])
    assert [s[:3] for s in carved(world.fetched(0, 1, 1, 2))] == [(0, 2, 5)]
    assert [s[:3] for s in carved(world.done(next(iter(world.flying.values()))))] == [(1, 2, 5)]
    while world.flying:
        assert not carved(world.done(next(iter(world.flying.values()))))
    assert carved(world.fetched(0, 1, 1, 4)) == [(2, 2, 5, True), (3, 2, 5, True)]
    world.drain()


def test_nearest_layer_first_among_what_is_there():
    world = one_session(3, Limits(max_inflight_bytes=20, max_transfer_bytes=10))
    world.open(0, 1, [Part("a", 0, 1), Part("b", 0, 1, fetch=1)])
    world.fetched(0, 1, 1, 1)
    order = []
    while world.flying:
        order += [s[:3] for s in carved(world.done(next(iter(world.flying.values()))))]
        if len(order) == 1:
            world.fetched(0, 1, 1, 3)
    assert order == [(0, 1, 2), (1, 1, 2), (2, 0, 1), (2, 1, 2)]


def test_a_session_that_only_waits_has_no_turn_and_takes_one_again():
    world = one_session(3, Limits(max_inflight_bytes=40, max_transfer_bytes=20))
    world.open_session(1, [(0, 10)] * 20)
    world.open(0, 1, [Part("a", 0, 1, fetch=1)])
    assert queued(world) == []
    assert len(submits(world.open(1, 1, [Part("b", 0, 2)]))) == 2  # all the room there is
    assert queued(world) == [1]
    for event in (FrontierReached(0, 1, 0), LimitsChanged(world.limits)):
        world.send(event)
    world.fetched(0, 1, 1, 1)
    assert sorted(queued(world)) == [0, 1]
    moved = [s for _ in range(6) for s in submits(world.done(next(iter(world.flying.values()))))]
    assert [s.layer for s in moved if s.session == 0] == [0] and queued(world) == [1]
    world.drain()


def test_the_rest_of_a_split_layer_waits_for_no_later_one():
    world = one_session(2, Limits(max_transfer_bytes=6, max_inflight_bytes=12))
    first = submits(world.open(0, 1, [Part("a", 0, 1, fetch=1)]) + world.fetched(0, 1, 1, 1))
    assert [(s.layer, s.byte_lo, s.byte_hi) for s in first] == [(0, 0, 6), (0, 6, 10)]
    assert not [c for batch in first for c in submits(world.done(batch))]
    assert [(s.layer, s.byte_lo) for s in submits(world.fetched(0, 1, 1, 2))] == [(1, 0), (1, 6)]
    world.drain()


def test_lost_objects_fail_their_parts_whole_and_seal_what_waited_for_them():
    world = one_session()
    world.open(0, 1, [Part("a", 0, 2), Part("b", 0, 3, 1), Part("c", 0, 1, 1)], [Part("b", 0, 1), Part("c", 0, 1)])
    world.fetched(0, 1, 1, 2)
    out = world.send(FetchFailed(0, 1, (1, 1), "the disk is gone"))
    assert failed(out) == [("b", 2, 5, "the disk is gone")]
    assert not of(out, Seal) and not submits(out)  # c still waits for its last layer
    out = world.fetched(0, 1, 1, 3)
    assert carved(out) == [(2, 5, 6, True)]
    world.drain()
    assert world.steps[0, 1].sides[SAVE].revoked == {0} and world.steps[0, 1].sides[SAVE].committed == {1}


def test_the_last_part_that_is_lost_seals_and_ends_the_loads():
    world = one_session(2)
    world.open(0, 1, [Part("a", 0, 2, 1), Part("b", 0, 1, 2)])
    assert failed(world.send(FetchFailed(0, 1, (0,), "gone"))) == [("a", 0, 2, "gone")]
    out = world.send(FetchFailed(0, 1, (1, 0), "gone"))
    assert failed(out) == [("b", 2, 3, "gone")]
    assert [c.layer for c in of(out, Seal)] == [0, 1] and of(out, LoadsDone)
    assert out.index(of(out, LoadFailed)[0]) < out.index(of(out, Seal)[0])


def test_a_failed_batch_fails_a_part_that_still_waits_whole():
    world = one_session()
    world.open(0, 1, [Part("a", 0, 1), Part("b", 0, 3, 1)])
    (batch,) = submits(world.fetched(0, 1, 1, 1))
    assert failed(world.fail(batch)) == [("b", 1, 4, "checksum")]
    assert world.fetched(0, 1, 1, 2) == []
    world.drain()


def fenced(world):
    return world.send(LoadsFenced(0, 1, "cut"))


def expired(world):
    world.now = 200.0
    return world.send(Tick())


def broken_off(world):
    return world.send(StepClosed(0, 1, False))


@pytest.mark.parametrize("end", [fenced, expired, broken_off])
def test_what_waits_at_the_end_of_the_loads_fails_once_and_late_news_of_it_is_counted(end):
    world = one_session()
    (batch,) = submits(
        world.open(0, 1, [Part("a", 0, 2, 1), Part("b", 0, 1, 2)], deadline=200.0) + world.fetched(0, 1, 1, 1)
    )
    out = end(world)
    assert [(request, lo, hi) for request, lo, hi, _ in failed(out)] == [("a", 0, 2), ("b", 2, 3)]
    assert not of(out, LoadsDone)
    before = world.flow.statistics().late_reports
    assert world.fetched(0, 1, 1, 2) == world.send(FetchFailed(0, 1, (0, 1), "gone")) == []
    assert world.flow.statistics().late_reports == before + 2
    out = world.fail(batch)
    assert not failed(out) and of(out, LoadsDone)
    world.drain()


def test_a_lost_session_waits_for_nothing():
    world = one_session()
    world.open(0, 1, [Part("a", 0, 2, 1)], [Part("a", 0, 2)])
    out = world.send(SessionLost(0))
    assert [type(c) for c in out] == [Revoke, LoadsDone, StepDone]
    assert world.fetched(0, 1, 1, 1) == [] and world.flow.statistics().late_reports == 1
    world.drain()


def test_a_commit_waits_for_arrivals():
    world = one_session(1)
    world.open(0, 1, [Part("a", 0, 1, 1)], [Part("a", 0, 1)])
    world.send(LayersComputed(0, 1, 1))
    (save,) = world.flying.values()
    assert not of(world.done(save), Commit)
    (load,) = submits(world.fetched(0, 1, 1, 1))
    assert of(world.done(load), Commit)


def test_memory_is_a_cohort_per_arrival_and_merges_again():
    world = one_session(4, Limits(max_inflight_bytes=40, max_transfer_bytes=20))
    world.open_session(1, [(0, 10)])
    world.open(1, 1, [Part("busy", 0, 100)])
    world.open(0, 1, [Part(f"r{i}", 0, 1, 1 + i % 5) for i in range(50)])
    cohorts = world.flow._state.sessions[0].steps[1].loads.cohorts
    assert len(cohorts) == 5
    for fetch in range(1, 6):
        world.fetched(0, 1, fetch, 4)
    assert len(cohorts) <= 2  # one may be in the middle of its first layer
    world.drain()

"""Loads whose objects are being fetched: carved as far as they have come, and exactly what is lost fails."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, coming, of, submits

from layerflow.flow.commands import (
    Arrived,
    Call,
    Commit,
    LoadFailed,
    LoadsDone,
    ObjectsLost,
    RoomFreed,
    Seal,
    TransferDone,
)
from layerflow.flow.events import (
    FetchOpened,
    FrontierReached,
    Hop,
    HostLost,
    IncomingLeased,
    Item,
    LayersComputed,
    Limits,
    LoadsFenced,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    StepClosed,
    Tick,
)
from layerflow.flow.host_lane import CALLS_AHEAD, FIRST_BYTES, MOST_BYTES, QUICK_S, CallSizer, HostLane


@pytest.fixture
def one_layer(monkeypatch):
    """Calls of one layer of one object each."""
    monkeypatch.setattr(HostLane, "most_bytes", lambda *_: 1)


def carved(commands):
    return [(s.layer, s.lo, s.hi, s.seals) for s in submits(commands, LOAD)]


def failed(commands):
    return [(c.request, c.lo, c.hi, c.reason) for c in of(commands, LoadFailed)]


def calls(commands):
    return [(c.transfer, c.lo, c.hi, c.layer_lo, c.layer_hi) for c in of(commands, Call)]


def one_session(layers=3, limits=None):
    world = World(limits)
    world.open_session(0, [(0, 10)] * layers)
    return world


# -- what waits


def test_layers_are_carved_as_they_arrive_and_seal_with_the_slowest(one_layer):
    world = one_session()
    world.bring(7, 3)
    out = world.open(0, 1, [Part("a", 0, 2), coming("b", 0, 3, 7), Part("c", 0, 2)])
    assert carved(out) == [(i, lo, hi, False) for i in range(3) for lo, hi in ((0, 2), (5, 7))]
    assert carved(world.fetched(7, 1)) == [(0, 2, 5, True)]
    assert carved(world.fetched(7, 3)) == [(1, 2, 5, True), (2, 2, 5, True)]
    world.drain()


def test_what_is_there_of_a_request_does_not_wait_for_the_rest(one_layer):
    world = one_session()
    world.bring(1, 3)
    out = world.open(0, 1, [Part("a", 0, 6, (Need(1, 0, 2, 4),))])
    assert carved(out) == [(i, lo, hi, False) for i in range(3) for lo, hi in ((0, 2), (4, 6))]
    assert carved(world.fetched(1, 3)) == [(i, 2, 4, True) for i in range(3)]
    world.drain()


def test_steps_share_a_fetch_and_each_hears_of_its_own_objects(one_layer):
    world = one_session()
    world.bring(1, 3, items=2)
    world.open(0, 1, [coming("a", 0, 2, 1, item=0)])
    world.open(0, 2, [coming("b", 0, 2, 1, item=1)])
    first, second, third = world.fetches.calls.values()
    assert [(s.step, s.layer) for s in submits(world.end_call(first))] == [(1, 0)]
    assert [(s.step, s.layer) for s in submits(world.end_call(third))] == [(1, 1)]
    assert [(s.step, s.layer) for s in submits(world.end_call(second))] == [(2, 0)]
    world.drain()


def test_an_object_is_published_when_it_is_whole_and_pinned_for_who_still_loads_it():
    world = one_session(limits=Limits(max_transfer_blocks=1))
    world.bring(1, 3, items=2)
    world.open(0, 1, [coming("a", 0, 2, 1, item=1)])
    out = world.fetched(1, 3)
    assert [(c.objects, c.readers) for c in of(out, Arrived)] == [((0,), ()), ((1,), ((0, 1, (1,)),))]
    assert of(out, TransferDone)
    world.drain()


def test_exactly_the_blocks_of_a_lost_object_fail_and_the_leading_ones_load():
    world = one_session()
    world.bring(1, 3, items=3)
    needs = tuple(Need(1, item, 2 * item, 2 * item + 2) for item in range(3))
    world.open(0, 1, [Part("a", 0, 6, needs)], [Part("a", 0, 1)])
    (call,) = world.fetches.calls.values()
    out = world.end_call(call, 1)
    assert failed(out) == [("a", 2, 4, "not fetched: gone")]
    assert [s[:3] for s in carved(out)] == [(i, lo, hi) for i in range(3) for lo, hi in ((0, 2), (4, 6))]
    assert of(out, ObjectsLost)[0].objects == (1,) and not of(out, RoomFreed), "the step may read its room"
    done = [c for s in submits(out, LOAD) for c in world.done(s)]
    assert of(done, LoadsDone) and of(done, RoomFreed) == [RoomFreed(Hop.FETCH, 1, (1,))]
    assert done.index(of(done, LoadsDone)[0]) < done.index(of(done, RoomFreed)[0])
    world.drain()
    assert world.steps[0, 1].sides[SAVE].revoked == {0}, "what is computed on top of it is not stored"


def test_the_last_object_that_is_lost_seals_and_ends_the_loads():
    world = one_session(2)
    world.bring(1, 2)
    world.open(0, 1, [coming("a", 0, 2, 1)])
    out = world.end_call(next(iter(world.fetches.calls.values())), 0)
    assert failed(out) == [("a", 0, 2, "not fetched: gone")]
    assert [c.layer for c in of(out, Seal)] == [0, 1] and of(out, LoadsDone) and of(out, RoomFreed)
    assert out.index(of(out, LoadFailed)[0]) < out.index(of(out, Seal)[0])
    world.drain()


def test_a_commit_waits_for_fetches():
    world = one_session(1)
    world.bring(1, 1)
    world.open(0, 1, [coming("a", 0, 1, 1)], [Part("a", 0, 1)])
    world.send(LayersComputed(0, 1, 1))
    (save,) = world.flying.values()
    assert not of(world.done(save), Commit)
    (load,) = submits(world.fetched(1, 1))
    assert of(world.done(load), Commit)
    world.drain()


# -- what holds a fetch


def ends():
    fenced = [LoadsFenced(0, 1, "cut")]
    return [("fenced", fenced), ("broken off", [StepClosed(0, 1, False)]), ("aborted", [RequestAborted(0, "a")])]


@pytest.mark.parametrize("events", [events for _, events in ends()], ids=[name for name, _ in ends()])
def test_a_step_that_is_over_holds_nothing(one_layer, events):
    world = one_session()
    world.bring(1, 3)
    world.open(0, 1, [coming("a", 0, 2, 1)])
    out = [command for event in events for command in world.send(event)]
    assert of(out, LoadsDone)
    out += [c for call in list(world.fetches.calls.values()) for c in world.end_call(call)]
    assert not world.fetches.calls, "nothing more of it moves"
    assert of(out, TransferDone) or of(out, Arrived)
    world.drain()


def test_a_step_whose_deadline_had_passed_when_it_opened_holds_nothing():
    world = one_session()
    world.bring(1, 3)
    out = world.open(0, 1, [coming("a", 0, 2, 1)], deadline=world.now - 1)
    assert failed(out) and of(out, LoadsDone)
    assert not world.flow._state.fetches.transfers[1].dependencies
    assert [command.readers for command in of(world.fetched(1, 3), Arrived)] == [()]
    world.drain()


def test_a_lost_session_holds_nothing(one_layer):
    world = one_session(layers=9)
    world.bring(1, 9)
    world.open(0, 1, [coming("a", 0, 2, 1)], [Part("a", 0, 2)])
    assert of(world.send(SessionLost(0)), LoadsDone)
    out = [c for call in list(world.fetches.calls.values()) for c in world.end_call(call)]
    assert of(out, ObjectsLost) and of(out, RoomFreed) and of(out, TransferDone) and not world.fetches.calls
    world.drain()


def test_what_is_wanted_again_before_the_host_has_ended_goes_on_where_it_was(one_layer):
    world = one_session(layers=9)
    world.bring(1, 9)
    world.send(IncomingLeased(1, True))
    first = next(iter(world.fetches.calls.values()))
    world.send(IncomingLeased(1, False))
    assert not of(world.end_call(first), Call), "nobody wants more of it"
    out = world.send(IncomingLeased(1, True))
    assert calls(out) == [(1, 0, 1, CALLS_AHEAD, CALLS_AHEAD + 1)]
    assert of(world.fetched(1, 9), Arrived)
    world.drain()


def test_a_fetch_of_which_nothing_comes_is_given_up_and_one_that_moves_is_not(one_layer):
    world = one_session(layers=9, limits=Limits(fetch_timeout_s=10.0))
    world.bring(1, 9)
    world.open(0, 1, [coming("a", 0, 2, 1)])
    for _ in range(6):  # 24 s in all
        world.now += 4.0
        assert not failed(world.send(Tick()))
        world.end_call(next(iter(world.fetches.calls.values())))
    world.now += 10.0
    assert failed(world.send(Tick())) == [("a", 0, 2, "not fetched: nothing of it came for 10 s")]
    assert world.flow.statistics().expired_fetches == 1
    world.drain()


def test_the_death_of_the_host_fails_what_has_not_come():
    world = one_session(limits=Limits(max_transfer_blocks=1))
    world.bring(1, 3, items=2)
    world.open(0, 1, [Part("a", 0, 4, (Need(1, 0, 0, 2), Need(1, 1, 2, 4)))])
    out = world.send(HostLost("signal 9"))
    assert failed(out) == [("a", 0, 4, "not fetched: signal 9")] and of(out, TransferDone)
    assert not world.fetches.calls
    world.bring(2, 3)
    assert of(world.fetched(2, 3), Arrived), "the next host is given work"
    world.drain()


# -- what moves when


def test_calls_keep_the_caps_and_several_are_in_flight():
    world = one_session(4, Limits(max_transfer_bytes=40, max_granted_bytes=100, max_transfer_blocks=4))
    out = world.send(FetchOpened(1, "e", (0, 1, 2, 3), (Item(10, 1),) * 3))
    assert calls(out) == [(1, 0, 3, 0, 1), (1, 0, 3, 1, 2), (1, 0, 3, 2, 3)], "90 of 100 bytes in flight"
    out = world.send(FetchOpened(2, "e", (0, 1), (Item(10, 1),) * 6))
    assert not calls(out)
    world.fetched(1, 4)
    assert {(c.transfer, c.lo, c.hi) for c in world.fetches.calls.values()} == {(2, 0, 4), (2, 4, 6)}
    world.drain()


def test_a_layer_of_an_object_larger_than_the_cap_moves_alone():
    world = one_session(2, Limits(max_transfer_bytes=5, max_granted_bytes=8))
    assert calls(world.bring(1, 2, items=2, size=9)) == [(1, 0, 1, 0, 1)]
    world.drain()


def test_a_begun_fetch_that_an_engine_waits_for_is_not_starved_by_new_ones(one_layer):
    world = one_session(layers=8)
    world.bring(1, 8)
    world.open(0, 1, [coming("a", 0, 1, 1)], deadline=500.0)
    number = 1
    while len(world.fetches.all[1].come[0]) < 8 and number < 40:
        number += 1  # another begins whenever a call ends
        world.bring(number, 8)
        world.open(0, number, [coming("b", 0, 1, number)], deadline=500.0 + number)
        world.end_call(next(iter(world.fetches.calls.values())))
        world.send(FrontierReached(0, 1, len(world.fetches.all[1].come[0]) - 1))
    assert number <= 8 * (CALLS_AHEAD + 1), "one call in so many is its own, however many begin"
    world.drain()


def test_what_a_step_waits_for_soonest_comes_first(one_layer):
    world = one_session(layers=9)
    world.bring(1, 9)  # fills the lane
    world.bring(2, 9)
    world.bring(3, 9)
    world.open(0, 1, [coming("late", 0, 1, 2)], deadline=190.0)
    world.open(0, 2, [coming("soon", 0, 1, 3)], deadline=180.0)
    begun = [c.transfer for call in list(world.fetches.calls.values()) for c in of(world.end_call(call), Call)]
    assert begun == [3, 2, 3], "nearest layer first, then nearest deadline; before what no step waits for"
    world.drain()


def test_engines_take_turns_whatever_they_have_asked_for(one_layer):
    world = one_session(layers=30)
    for number in range(1, 6):
        world.bring(number, 30, source="greedy")
    world.bring(6, 30, source="modest")
    moved = []
    for _ in range(40):
        call = next(iter(world.fetches.calls.values()))
        moved.append(call.transfer == 6)
        world.end_call(call)
    assert sum(moved[CALLS_AHEAD:]) in range(17, 21)
    world.drain()


# -- how much


def paced(overhead_s, bytes_per_s, rounds=40):
    pace = CallSizer()
    for _ in range(rounds):
        pace.ended(pace.nbytes, overhead_s + pace.nbytes / bytes_per_s)
    return pace.nbytes


def test_calls_grow_where_each_costs_much_and_stay_small_where_bytes_do():
    assert paced(30e-3, 1e9) == MOST_BYTES, "a store that takes 30 ms for anything"
    assert paced(0.3e-3, 10e6) <= 2 * FIRST_BYTES, "one of 10 MB/s: the next fetch does not wait for seconds"
    assert QUICK_S < 0.3e-3 + paced(0.3e-3, 2e9) / 2e9 < 4 * QUICK_S
    pace = CallSizer()
    pace.ended(100, 1e-6)
    assert pace.nbytes == FIRST_BYTES, "a small call says nothing of large ones"

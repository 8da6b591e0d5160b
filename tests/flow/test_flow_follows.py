"""Loads that take what another session's step stores: in its order, and never what is not published in the end."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, coming, of, submits

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Arrived, Commit, LayersStored, LoadFailed, LoadsDone, ObjectsLost, RoomFreed
from layerflow.flow.events import (
    FetchAvailable,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    Hop,
    IncomingFailed,
    IncomingLeased,
    Item,
    LayersComputed,
    Limits,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    StepClosed,
)

P, D = 0, 1


def pair(layers: int = 3, limits: Limits | None = None) -> World:
    world = World(limits or Limits())
    world.open_session(P, [(0, 10)] * layers)
    world.open_session(D, [(0, 10)] * layers)
    return world


def following(follow: int, blocks: int = 2) -> Part:
    return Part("d", 0, blocks, (Need(follow, 0, 0, blocks),))


def test_a_load_is_granted_layer_by_layer_as_the_save_stores_it():
    world = pair()
    saves = submits(world.open(P, 1, (), [Part("p", 0, 2)]))
    follow = world.follow(P, 1, 0, [0])
    assert not submits(world.open(D, 2, [following(follow)]))
    world.send(LayersComputed(P, 1, 3))
    for layer, save in enumerate(saves):
        assert [(s.session, s.layer) for s in submits(world.done(save), LOAD)] == [(D, layer)]
    world.drain()


def test_the_last_layer_comes_with_the_publication():
    """A save whose own request's load fails late was computed from garbage, however much of it is stored."""
    world = pair()
    out = world.open(P, 1, [Part("p", 0, 1)], [Part("p", 0, 2)])
    loads = submits(out, LOAD)
    follow = world.follow(P, 1, 0, [0])
    world.open(D, 2, [following(follow)])
    granted = submits(world.send(LayersComputed(P, 1, 3)), LOAD)
    for save in [one for one in list(world.flying.values()) if one.direction is SAVE]:
        granted += submits(world.done(save), LOAD)
    assert [s.layer for s in granted if s.session == D] == [0, 1]
    out = world.fail(loads[0])
    (failed,) = [one for one in of(out, LoadFailed) if one.session == D]
    assert (failed.lo, failed.hi) == (0, 2) and failed.reason.startswith("not stored: its load failed")
    world.drain()


def test_a_session_that_is_lost_fails_its_followers_and_leaves_the_room_while_they_read():
    world = pair()
    saves = submits(world.open(P, 1, (), [Part("p", 0, 2)]))
    follow = world.follow(P, 1, 0, [0])
    world.open(D, 2, [following(follow)])
    world.send(LayersComputed(P, 1, 3))
    (reading,) = submits(world.done(saves[0]), LOAD)
    out = world.send(SessionLost(P))
    assert [(one.session, one.lo, one.hi) for one in of(out, LoadFailed)] == [(D, 0, 2)]
    assert of(out, ObjectsLost) and not of(out, RoomFreed), "its room is read"
    assert of(world.done(reading), RoomFreed)
    world.drain()


def test_what_nobody_saved_is_taken_from_the_step_that_saves_it_then():
    world = pair()
    promise = world.promise((0, 1, 2))
    world.open(D, 2, [following(promise)])
    saves = submits(world.open(P, 1, (), [Part("p", 0, 2)]))
    world.send(FollowMoved(promise, (0,), world.follow(P, 1, 0, [0])))
    world.send(LayersComputed(P, 1, 3))
    assert [s.layer for save in saves for s in submits(world.done(save), LOAD)] == [0, 1, 2]
    world.drain()


def test_a_lost_session_whose_own_loads_waited_for_its_own_saves_hears_no_more_of_them():
    """Its steps are over with it: a load that its own save gives up then fails for nobody."""
    world = pair()
    world.open(P, 1, (), [Part("p", 0, 2)])
    follow = world.follow(P, 1, 0, [0])
    world.open(P, 2, [following(follow)])
    world.open(D, 3, [following(follow)])
    out = world.send(SessionLost(P))
    assert [(one.session, one.lo, one.hi) for one in of(out, LoadFailed)] == [(D, 0, 2)]
    assert [one.session for one in of(out, LoadsDone)] == [P, D]
    world.drain()


def test_a_fetch_that_expires_as_the_session_is_lost_fails_nothing_of_it():
    world = World(Limits(fetch_timeout_s=1.0))
    world.open_session(P, [(0, 10)] * 3)
    world.bring(1, 3)
    world.open(P, 1, [coming("p", 0, 1, 1)])
    world.now += 2
    assert not of(world.send(SessionLost(P)), LoadFailed)
    while world.fetches.calls:
        world.end_call(next(iter(world.fetches.calls.values())))
    world.drain()


def test_steps_that_wait_for_each_other_end_at_once():
    """Each loads what the other saves, and saves what builds on its loads: neither could be published."""
    world = pair()
    promise = world.promise((0, 1, 2))
    world.open(D, 1, [following(promise)], [Part("e", 0, 2)])
    back = world.follow(D, 1, 0, [0])
    world.open(P, 2, [following(back)], [Part("p", 0, 2)])
    out = world.send(FollowMoved(promise, (0,), world.follow(P, 2, 0, [0])))
    (failed,) = of(out, LoadFailed)
    assert (failed.session, failed.lo, failed.hi) == (D, 0, 2) and "waits for what this one stores" in failed.reason
    for session, step in ((D, 1), (P, 2)):
        out += world.send(LayersComputed(session, step, 3))
        out += world.send(StepClosed(session, step, True))
    while world.flying:
        out += world.done(next(iter(world.flying.values())))
    assert [(one.session, one.step) for one in of(out, Commit)] == [(D, 1), (P, 2)], "the other's loads came"
    assert not world.live
    world.drain()


def test_a_circle_over_three_steps_and_an_earlier_load_of_a_request_ends_at_once():
    """D's second step saves for the request that its first one loads: that load ends before it is published."""
    world = World(Limits())
    for session in (0, 1, 2):
        world.open_session(session, [(0, 10)] * 3)
    promise = world.promise((0, 1, 2))
    world.open(0, 1, [following(promise)])
    world.open(0, 2, (), [Part("d", 0, 2)])
    world.open(1, 3, [following(world.follow(0, 2, 0, [0]))], [Part("e", 0, 2)])
    world.open(2, 4, [following(world.follow(1, 3, 0, [0]))], [Part("p", 0, 2)])
    out = world.send(FollowMoved(promise, (0,), world.follow(2, 4, 0, [0])))
    assert next((one.session, one.step) for one in of(out, LoadFailed)) == (0, 1)
    world.drain()


def test_a_chain_of_followers_is_no_circle():
    world = World(Limits())
    for session in (0, 1, 2):
        world.open_session(session, [(0, 10)] * 3)
    promise = world.promise((0, 1, 2))
    world.open(0, 1, [following(promise)], [Part("a", 0, 2)])
    world.open(1, 2, [following(world.follow(0, 1, 0, [0]))], [Part("b", 0, 2)])
    world.open(2, 3, (), [Part("p", 0, 2)])
    out = world.send(FollowMoved(promise, (0,), world.follow(2, 3, 0, [0])))
    assert not of(out, LoadFailed)
    world.drain()


def test_a_reader_is_not_told_of_layers_that_were_given_up_before_they_were_stored():
    """What is cancelled has nothing left to be granted, as if it were stored; its reader hears that it is lost."""
    world = pair(limits=Limits(max_granted_bytes=2))
    assert not submits(world.open(P, 1, (), [Part("p", 0, 2)])), "its batches wait for room"
    world.follow(P, 1, 0, [0], leased=True)
    out = world.send(RequestAborted(P, "p"))
    assert of(out, ObjectsLost) and not of(out, LayersStored)
    world.drain()


def test_a_reader_is_told_of_each_layer_as_it_is_stored_and_of_the_last_by_its_publication():
    world = pair()
    saves = submits(world.open(P, 1, (), [Part("p", 0, 2)]))
    follow = world.follow(P, 1, 0, [0], leased=True)
    world.send(LayersComputed(P, 1, 3))
    out = [command for save in saves for command in world.done(save)]
    assert of(out, LayersStored) == [LayersStored(follow, 1), LayersStored(follow, 2)]
    assert [one.transfer for one in of(out, Arrived)] == [follow]
    world.drain()


def test_what_is_lent_and_given_up_keeps_its_room_until_its_reader_is_done():
    world = pair()
    world.open(P, 1, (), [Part("p", 0, 2)])
    follow = world.follow(P, 1, 0, [0], leased=True)
    assert not of(world.send(SessionLost(P)), RoomFreed)
    assert of(world.send(IncomingLeased(follow, False)), RoomFreed) == [RoomFreed(Hop.LOCAL, follow, (0,))]
    world.drain()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (FollowOpened(2, (0, 1, 2), 1), "numbers ascend"),
        (FetchOpened(2, "e", (0, 1, 2), (Item(1, 1),)), "numbers ascend"),
        (FetchOpened(3, "e", (0, 1, 2), (Item(1, 1),), hop=Hop.LOCAL), "by the way LOCAL"),
        (FetchAvailable(2, 3), "follow 2 is no fetch"),
        (FollowMoved(1, (0,), 2), "fetch 1 is no follow"),
        (IncomingFailed(2, ((0, "gone"),)), "a step saves them"),
        (IncomingLeased(3, True), "never opened"),
    ],
)
def test_a_fetch_and_a_follow_are_numbered_together_and_not_taken_for_each_other(event, words):
    world = pair()
    world.bring(1, 3)
    world.open(P, 1, (), [Part("p", 0, 2)])
    assert world.follow(P, 1, 0, [0]) == 2
    before = world.flow.statistics()
    with pytest.raises(InvalidTransition, match=words):
        world.flow.handle(event, world.now)
    assert world.flow.statistics() == before
    world.flow.validate()
    world.drain()


def test_a_load_takes_blocks_of_a_fetch_and_of_a_follow_at_once():
    world = pair()
    world.bring(1, 3)
    saves = submits(world.open(P, 1, (), [Part("p", 0, 2)]))
    follow = world.follow(P, 1, 0, [0])
    world.open(D, 2, [Part("d", 0, 3, (Need(1, 0, 0, 1), Need(follow, 0, 1, 3)))])
    assert next((s.layer, s.lo, s.hi) for s in submits(world.fetched(1, 3))) == (0, 0, 1)
    world.send(LayersComputed(P, 1, 3))
    assert (0, 1, 3) in [(s.layer, s.lo, s.hi) for save in saves for s in submits(world.done(save), LOAD)]
    world.drain()

"""What a step, its parts and objects on their way go through, from the first state to each last one."""

from __future__ import annotations

from flow_world import LOAD, SAVE, World, submits

from layerflow.flow.events import FollowMoved, LayersComputed, Need, Part, RequestAborted, StepClosed
from layerflow.flow.graph import IncomingObjectState, JobState, PartState

P, D = 0, 1


def world() -> World:
    made = World()
    for session in (P, D):
        made.open_session(session, [(0, 10)] * 2)
    return made


def test_parts_and_directions_of_a_step():
    flow = world()
    granted = flow.open(P, 1, [Part("a", 0, 1)], [Part("a", 0, 1), Part("b", 0, 1)])
    flow.send(LayersComputed(P, 1, 2))
    first, *others = [one for one in list(flow.flying.values()) if one.direction is SAVE]
    flow.send(RequestAborted(P, "b"))
    assert flow.flow.lives()[P, 1, SAVE, 1] is PartState.CANCELLED, "a batch still touches it"
    for save in (first, *others):
        flow.done(save)
    lives = flow.flow.lives()
    assert lives[P, 1, SAVE, 1] is PartState.REVOKED
    assert lives[P, 1, SAVE, 0] is PartState.IN_PLACE, "what it was computed from may still fail"
    for load in submits(granted, LOAD):
        flow.done(load)
    lives = flow.flow.lives()
    assert lives[P, 1, SAVE, 0] is PartState.COMMITTED
    assert lives[P, 1, LOAD, 0] is PartState.IN_PLACE
    assert lives[P, 1, LOAD] is lives[P, 1, SAVE] is JobState.ENDED
    flow.send(StepClosed(P, 1, True))
    assert not flow.flow.lives(), "it is over"


def test_a_step_that_is_cut_waits_for_what_is_in_flight():
    flow = world()
    (*loads,) = submits(flow.open(P, 1, [Part("a", 0, 1)]), LOAD)
    flow.send(StepClosed(P, 1, False))
    assert flow.flow.lives()[P, 1, LOAD] is JobState.CANCELLED
    assert flow.flow.lives()[P, 1, LOAD, 0] is PartState.CANCELLED
    for load in loads:
        flow.done(load)
    assert not flow.flow.lives()


def test_objects_on_their_way():
    flow = world()
    promise = flow.promise((0, 1), objects=2)
    reader = Part("d", 0, 2, (Need(promise, 0, 0, 1), Need(promise, 1, 1, 2)))
    flow.open(D, 2, [reader])
    flow.open(P, 1, (), [Part("p", 0, 1)])
    saved = flow.follow(P, 1, 0, [0])
    flow.send(FollowMoved(promise, (0,), saved))
    assert flow.flow.lives()[promise, 0] is IncomingObjectState.REBOUND
    assert flow.flow.lives()[promise, 1] is flow.flow.lives()[saved, 0] is IncomingObjectState.COMING
    flow.send(LayersComputed(P, 1, 2))
    flow.send(StepClosed(P, 1, True))
    reading = []
    while saves := [one for one in list(flow.flying.values()) if one.direction is SAVE]:
        reading += submits(flow.done(saves[0]), LOAD)
    assert (saved, 0) not in flow.flow.lives(), "published, and nothing of it is still to come"

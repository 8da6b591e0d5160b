"""Sessions that stop or are slow hold up nobody else, and garbage of one step is not published by the next."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, coming, of, submits

from layerflow.flow import Flow
from layerflow.flow.commands import Commit, LoadsDone, Revoke, Submit
from layerflow.flow.events import (
    BatchDone,
    LayersComputed,
    LayerShape,
    Limits,
    LoadsFenced,
    Part,
    RequestAborted,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
)

SMALL = Limits(max_transfer_bytes=100, max_granted_bytes=200)
LARGER = Limits(max_transfer_bytes=100, max_granted_bytes=400)


def two_sessions(layers=2, limits=SMALL):
    world = World(limits)
    world.open_session(0, [(0, 100)] * layers)
    world.open_session(1, [(0, 100)] * layers)
    return world


def total(batches):
    return sum(batch.nbytes for batch in batches)


TWO_LOADS = Limits(max_granted_bytes=270, max_transfer_bytes=100)
"""Room for two batches of loads, beside the one of saves that loads of several sessions leave."""


@pytest.mark.parametrize("how", ["deadline", "fence", "closed"])
def test_loads_called_back_of_a_silent_engine_leave_the_budget_to_others(how):
    world = two_sessions(limits=TWO_LOADS)
    silent = submits(world.open(0, 1, [Part("a", 0, 4)], deadline=110.0, save_deadline=110.0))
    assert total(silent) == 200
    assert not submits(world.open(1, 2, [Part("b", 0, 2)]))
    world.now = 110.0 if how == "deadline" else 105.0
    events = {"deadline": Tick(), "fence": LoadsFenced(0, 1, "cut"), "closed": StepClosed(0, 1, False)}
    out = world.send(events[how])
    granted = submits(out, LOAD)
    assert [batch.session for batch in granted] == [1, 1] and not of(out, LoadsDone)
    assert world.flow.statistics().load_inflight_bytes == 400
    assert [of(world.fail(batch), LoadsDone) != [] for batch in silent] == [False, True]  # still awaited
    assert not submits(world.open(1, 3, [Part("c", 0, 1)]))  # not given back twice
    world.drain()


def test_a_late_success_of_what_was_called_back_is_not_given_back_twice():
    world = two_sessions(limits=TWO_LOADS)
    silent = submits(world.open(0, 1, [Part("a", 0, 2)], deadline=110.0))
    world.now = 110.0
    world.send(Tick())
    for batch in silent:
        assert not submits(world.done(batch))
    assert total(submits(world.open(1, 2, [Part("b", 0, 9)]))) == 200
    world.drain()


def test_saves_called_back_of_a_silent_engine_leave_the_budget_to_others():
    world = two_sessions(limits=LARGER)
    silent = submits(world.open(0, 1, (), [Part("a", 0, 1)], save_deadline=110.0))
    silent += submits(world.send(LayersComputed(0, 1, 2)))
    assert total(silent) == 200
    world.open(1, 2, (), [Part("b", 0, 2)])
    assert not submits(world.send(LayersComputed(1, 2, 2)))
    world.now = 110.0
    out = world.send(Tick())
    assert not of(out, Revoke) and total(submits(out)) == 200
    assert [of(world.fail(batch), Revoke) != [] for batch in silent] == [False, True]
    world.drain()
    assert world.steps[1, 2].sides[SAVE].committed == {0}


def test_saves_that_wait_for_compute_do_not_hold_up_another_session():
    world = two_sessions(layers=4, limits=LARGER)
    ahead = submits(world.open(0, 1, (), [Part("a", 0, 4)]))
    assert total(ahead) == 100  # a quarter of the budget, and no more
    assert not submits(world.open(1, 2, (), [Part("b", 0, 1)]))
    world.send(LayersComputed(1, 2, 4))
    for _ in range(4):
        (mine,) = [batch for batch in world.flying.values() if batch.session == 1]
        world.done(mine)
    assert world.steps[1, 2].sides[SAVE].committed == {0}
    assert list(world.flying.values()) == ahead
    world.drain()


def test_saves_that_wait_for_compute_leave_loads_three_quarters_of_the_budget():
    world = two_sessions(limits=LARGER)
    world.open(0, 1, (), [Part("a", 0, 4)])
    assert total(submits(world.open(1, 2, [Part("b", 0, 4)]))) == 300
    world.drain()


def test_saves_computed_at_once_stay_within_their_half_however_many_sessions_there_are():
    world = World(Limits(max_transfer_bytes=10, max_granted_bytes=400))
    for session in range(8):
        world.open_session(session, [(0, 10)] * 2)
    for session in range(8):
        world.open(session, 1, (), [Part("a", 0, 8)])
    assert world.inflight(SAVE) == 8 * 20, "each session's share of what may wait is granted ahead"
    for session in range(8):
        world.send(LayersComputed(session, 1, 2))
        assert world.inflight(SAVE) <= 200
    assert total(submits(world.open(0, 7, [Part("c", 0, 20)]))) == 200  # loads find their half all the same
    world.drain()


def test_a_step_that_is_computed_passes_an_earlier_one_that_is_not():
    world = two_sessions(limits=LARGER)
    (first,) = submits(world.open(0, 1, (), [Part("a", 0, 4)]))
    assert not submits(world.open(0, 2, (), [Part("b", 0, 1)]))
    (granted,) = submits(world.send(LayersComputed(0, 2, 1)))
    assert (first.step, granted.step) == (1, 2)
    world.drain()


def two_steps(world, layers=2):
    loads = submits(world.open(0, 1, [Part("r", 0, 1), Part("x", 0, 1)]), LOAD)
    saves = submits(world.open(0, 2, (), [Part("r", 0, 1), Part("s", 0, 1)]), SAVE)
    world.send(LayersComputed(0, 2, layers))
    return loads, saves


def test_a_failed_load_kills_what_the_next_open_step_saves_of_its_request():
    world = World(Limits(max_transfer_blocks=1))
    world.open_session(0, [(0, 10)] * 2)
    loads, saves = two_steps(world)
    for batch in saves:
        assert not of(world.done(batch), Commit)
    out = world.fail(next(batch for batch in loads if batch.lo == 0))
    assert [c.parts for c in of(out, Revoke)] == [(0,)]
    assert [c.parts for c in of(out, Commit)] == [(1,)]  # nobody loads for what is left
    world.drain()


def test_a_commit_waits_for_an_earlier_steps_loads_of_its_requests():
    world = World()
    world.open_session(0, [(0, 10)] * 2)
    loads, saves = two_steps(world)
    out = [c for batch in [*saves, loads[0]] for c in world.done(batch)]
    assert not of(out, Commit)
    (commit,) = of(world.done(loads[1]), Commit)
    assert (commit.step, commit.parts) == (2, (0, 1))
    world.drain()


def test_a_commit_waits_neither_for_other_requests_nor_for_later_steps():
    world = World()
    world.open_session(0, [(0, 10)])
    world.open(0, 1, [Part("other", 0, 1)])
    (save,) = submits(world.open(0, 2, (), [Part("r", 0, 1)]))
    world.open(0, 3, [Part("r", 0, 1)])
    world.send(LayersComputed(0, 2, 1))
    assert [c.parts for c in of(world.done(save), Commit)] == [(0,)]
    world.drain()


@pytest.mark.parametrize("event", [LoadsFenced(0, 1, "cut"), RequestAborted(0, "x")])
def test_a_held_commit_goes_on_once_the_loads_are_decided(event):
    world = World()
    world.open_session(0, [(0, 10)])
    world.bring(1, 1)
    world.open(0, 1, [Part("r", 0, 1), coming("x", 0, 1, 1)])
    (save,) = submits(world.open(0, 2, (), [Part("r", 0, 1)]))
    world.send(LayersComputed(0, 2, 1))
    (load,) = [batch for batch in world.flying.values() if batch.direction is LOAD]
    world.done(load)
    assert not of(world.done(save), Commit)
    assert [c.step for c in of(world.send(event), Commit)] == [2]  # r had arrived in full
    world.drain()


def test_a_held_commit_does_not_wait_for_the_reports_of_fenced_loads():
    world = World(Limits(max_transfer_blocks=1))
    world.open_session(0, [(0, 10)])
    mine, others = submits(world.open(0, 1, [Part("r", 0, 1), Part("x", 0, 1)]))
    (save,) = submits(world.open(0, 2, (), [Part("r", 0, 1)]))
    world.send(LayersComputed(0, 2, 1))
    world.done(mine)
    assert not of(world.done(save), Commit)
    out = world.send(LoadsFenced(0, 1, "cut"))
    assert [c.step for c in of(out, Commit)] == [2] and not of(out, LoadsDone)
    assert of(world.fail(others), LoadsDone)
    world.drain()


def test_room_for_saves_that_are_not_computed_goes_round_between_sessions():
    """A session that computes fast would otherwise take each time what it has given back."""
    world = World(Limits(max_transfer_bytes=100, max_granted_bytes=400))
    for number in range(3):
        world.open_session(number, [(0, 100)] * 4)
    granted = [submits(world.open(number, number, saves=[Part("a", 0, 1)]), SAVE) for number in range(3)]
    assert [len(batches) for batches in granted] == [1, 0, 0], "there is room for one"
    (batch,) = granted[0]
    for _ in range(6):
        out = world.send(LayersComputed(batch.session, batch.session, batch.layer + 1)) + world.done(batch)
        (following,) = submits(out, SAVE)
        assert following.session == (batch.session + 1) % 3
        batch = following
    world.drain()


@pytest.mark.parametrize("sessions", [1, 10, 200])
def test_an_event_asks_the_sessions_that_it_concerns_however_many_wait(sessions):
    layers = 12
    flow = Flow(Limits(max_transfer_bytes=100, max_granted_bytes=4000))
    for number in range(sessions):
        flow.handle(SessionOpened(number, (LayerShape(0, 100),) * layers), 0.0)
    waiting: dict[int, list[Submit]] = {number: [] for number in range(sessions)}
    events = 0

    def say(event):
        nonlocal events
        events += 1
        for batch in submits(flow.handle(event, 0.0)):
            waiting[batch.session].append(batch)

    for number in range(sessions):
        say(StepOpened(number, 1, 10.0, 10.0, (), (Part("a", 0, 1),)))
    for layer in range(layers):
        for number in range(sessions):
            say(LayersComputed(number, 1, layer + 1))
            for batch in [batch for batch in waiting[number] if batch.gate <= layer]:
                waiting[number].remove(batch)
                say(BatchDone(number, batch.batch))
    flow.validate()
    assert flow.statistics().tries <= 1.25 * events, "of two events for each batch"

"""Who goes first, how much at once, and when."""

from __future__ import annotations

import pytest
from flow_world import LOAD, SAVE, World, coming, of, submits

from layerflow.errors import ConfigError
from layerflow.flow import Flow
from layerflow.flow.commands import WakeAt
from layerflow.flow.events import (
    FrontierReached,
    LayersComputed,
    LayerShape,
    Limits,
    LimitsChanged,
    Part,
    SessionOpened,
    StepOpened,
    Tick,
)


def test_layers_past_the_prefetch_window_are_granted_with_the_layer_that_opens_their_gate():
    world = World(Limits(prefetch_layers=2))
    world.open_session(0, [(0, 10)] * 6)
    assert [(s.layer, s.gate) for s in submits(world.open(0, 1, [Part("a", 0, 1)]))] == [
        *[(0, -2), (1, -1), (2, 0), (3, 1), (4, 2), (5, 3)]
    ]
    assert not submits(world.send(FrontierReached(0, 1, 0)))
    world.drain()


def test_without_a_prefetch_window_no_load_has_a_gate():
    world = World()
    world.open_session(0, [(0, 10)] * 3)
    assert [s.gate for s in submits(world.open(0, 1, [Part("a", 0, 1)]), LOAD)] == [-1] * 3


def test_layers_past_the_prefetch_window_leave_room_for_what_can_move():
    world = World(Limits(prefetch_layers=1, max_granted_bytes=80, max_transfer_bytes=10))
    world.open_session(0, [(0, 10)] * 6)
    out = submits(world.open(0, 1, [Part("a", 0, 1)]))
    assert [s.layer for s in out] == [0, 1, 2, 3]  # one that can move, and three of the loads' four quarters
    world.open_session(1, [(0, 10)] * 6)
    assert [s.layer for s in submits(world.open(1, 2, [Part("b", 0, 1)]))] == [0], "the engine that waits has room"
    world.drain()


def test_sessions_share_what_may_wait_at_its_gate():
    world = World(Limits(prefetch_layers=1, max_granted_bytes=160, max_transfer_bytes=10))
    for session in range(2):
        world.open_session(session, [(0, 10)] * 20)
    layers = [[s.layer for s in submits(world.open(session, 1, [Part("a", 0, 1)]))] for session in range(2)]
    assert layers == [[0, 1, 2, 3], [0, 1, 2, 3]]
    world.drain()


def test_a_gate_that_opens_lets_another_session_be_granted_more():
    world = World(Limits(prefetch_layers=1, max_granted_bytes=40, max_transfer_bytes=10))
    for session in range(2):
        world.open_session(session, [(0, 10)] * 3)
    first = submits(world.open(0, 1, [Part("a", 0, 1)]))
    second = submits(world.open(1, 1, [Part("b", 0, 1)]))
    assert [[s.layer for s in out] for out in (first, second)] == [[0, 1], [0]]
    world.done(first[0])
    # The other session waits longer for such room than this one, which has had it.
    assert [(s.session, s.layer) for s in submits(world.send(FrontierReached(0, 1, 0)))] == [(1, 1)]
    world.drain()


def test_the_frontier_opens_gates_whatever_the_order_of_their_grants():
    world = World(Limits(prefetch_layers=1))
    world.open_session(0, [(0, 10)] * 4)
    world.bring(1, 4)
    world.open(0, 1, [Part("a", 0, 1), coming("b", 0, 1, 1)])
    world.fetched(1, 4)
    for layer in range(4):
        world.send(FrontierReached(0, 1, layer))
    assert world.flow._state.budget.gated == [0, 0]
    world.drain()


def test_gated_loads_past_new_limits_hold_up_nobody():
    world = World(Limits(prefetch_layers=1, max_granted_bytes=400, max_transfer_bytes=10))
    world.open_session(0, [(0, 10)] * 10)
    world.open_session(1, [(0, 10)] * 2)
    assert len(submits(world.open(0, 1, [Part("a", 0, 1)]))) == 10
    world.done(next(iter(world.flying.values())))
    world.send(LimitsChanged(Limits(prefetch_layers=1, max_granted_bytes=40, max_transfer_bytes=10)))
    assert [s.layer for s in submits(world.open(1, 2, [Part("b", 0, 1)]))] == [0, 1]
    world.drain()


def test_loads_before_saves_when_contended():
    world = World(Limits(max_granted_bytes=40, max_transfer_bytes=10))
    world.open_session(0, [(0, 10)] * 8)
    out = submits(world.open(0, 1, [Part("a", 0, 1)], [Part("a", 0, 1)]))
    assert [s.direction for s in out] == [LOAD] * 4
    order = []
    while world.flying:
        load = next((s for s in world.flying.values() if s.direction is LOAD), None)
        order += [s.direction for s in submits(world.done(load or next(iter(world.flying.values()))))]
    assert order == [LOAD] * 4 + [SAVE] * 8


def test_saves_do_not_take_the_room_that_a_load_waits_for():
    world = World(Limits(max_granted_bytes=40, max_transfer_bytes=20))
    world.open_session(0, [(0, 15)] * 4)
    world.open_session(1, [(0, 5)] * 2)
    world.open(0, 1, [Part("a", 0, 1)])
    assert world.inflight(LOAD) == 30
    saves = submits(world.open(1, 1, (), [Part("b", 0, 9)]))
    assert world.inflight(SAVE) == 10 == sum(save.nbytes for save in saves), "the room that loads leave, and no more"
    (load,) = submits(world.done(next(iter(world.flying.values()))))
    assert load.direction is LOAD
    world.drain()


def test_saves_take_at_most_half_and_a_load_always_finds_room():
    world = World(Limits(max_granted_bytes=40, max_transfer_bytes=40))
    world.open_session(0, [(0, 5)] * 8)
    world.open(0, 1, (), [Part("a", 0, 2)])
    world.send(LayersComputed(0, 1, 8))
    assert world.inflight(SAVE) == 20
    world.open(0, 2, [Part("b", 0, 8)])
    assert world.inflight(LOAD) == 20
    world.drain()


def test_under_a_lowered_budget_loads_wait_for_saves_that_move():
    world = World(Limits(max_granted_bytes=400))
    world.open_session(0, [(0, 10)] * 10)
    world.open(0, 1, (), [Part("a", 0, 2)])
    world.send(LayersComputed(0, 1, 10))
    assert world.inflight(SAVE) == 200
    world.send(LimitsChanged(Limits(max_granted_bytes=20)))
    world.open(0, 2, [Part("b", 0, 1)])
    assert not world.inflight(LOAD)
    while not world.inflight(LOAD):
        world.done(next(iter(world.flying.values())))
    assert world.inflight(SAVE) <= 10
    world.drain()


def test_limits_never_revoke_what_is_granted():
    world = World()
    world.open_session(0, [(0, 10)] * 4)
    world.open(0, 1, [Part("a", 0, 4)])
    assert world.send(LimitsChanged(Limits(max_granted_bytes=2, max_transfer_blocks=1))) == []
    assert len(world.flying) == 4


def test_nearest_to_its_frontier_first_then_the_earlier_deadline():
    world = World(Limits(max_granted_bytes=20, max_transfer_bytes=10))
    world.open_session(0, [(0, 10)] * 3)
    world.open(0, 1, [Part("a", 0, 2)], deadline=900.0)
    world.open(0, 2, [Part("b", 0, 1)], deadline=800.0)
    world.open(0, 3, [Part("c", 0, 1)], deadline=700.0)
    world.send(FrontierReached(0, 1, 1))  # step 1 has carved layer 0: layer 1 is at distance 0, the others at 1
    order = []
    while world.flying:
        order += [(s.step, s.layer) for s in submits(world.done(next(iter(world.flying.values()))))]
    assert order == [(1, 1), (1, 1), (3, 0), (2, 0), (1, 2), (1, 2), (3, 1), (2, 1), (3, 2), (2, 2)]


def test_one_long_prompt_starves_nobody():
    world = World(Limits(max_granted_bytes=80, max_transfer_bytes=20))
    world.open_session(0, [(0, 10)] * 20)
    world.open_session(1, [(0, 4)] * 4)
    world.open(0, 1, [Part("long", 0, 100)])
    world.open(1, 1, [Part("short", 0, 5)])
    taken = [0, 0]
    while any(key[0] == 1 and not one.loads_done for key, one in world.live.items()):
        for s in submits(world.done(next(iter(world.flying.values())))):
            taken[s.session] += s.nbytes
    assert taken[1] == 80
    assert taken[0] <= 80 + 100  # an even share, what was in flight, and a quantum
    world.drain()


def test_even_shares_whatever_the_batch_sizes():
    world = World(Limits(max_granted_bytes=120, max_transfer_bytes=30), validate=False)
    world.open_session(0, [(0, 30)] * 2)
    world.open_session(1, [(0, 7)] * 2)
    world.open(0, 1, [Part("a", 0, 300)])
    world.open(1, 1, [Part("b", 0, 1000)])
    taken = [0, 0]
    for _ in range(200):
        for s in submits(world.done(next(iter(world.flying.values())))):
            taken[s.session] += s.nbytes
    assert 0.9 < taken[0] / taken[1] < 1.1


def test_the_budget_is_over_all_sessions_and_refilled_at_once():
    world = World(Limits(max_granted_bytes=60, max_transfer_bytes=10))  # one batch of saves has room beside the loads
    for session in range(3):
        world.open_session(session, [(0, 10)] * 10)
    for session in range(3):
        world.open(session, 1, [Part("a", 0, 1)])
    while len(world.flying) == 5:
        world.done(next(iter(world.flying.values())))
    assert not any(job for s in world.flow._state.sessions.values() for job in s.pending)
    world.drain()


@pytest.mark.parametrize("most", [0, 1, 4, 11, 12])
def test_a_pause_changes_neither_the_batches_nor_their_order(most):
    def granted(world):
        world.open_session(0, [(0, 10)] * 4)
        world.open_session(1, [(0, 30)] * 2)
        opened = world.open(0, 1, [Part("a", 0, 2)], [Part("a", 0, 1)]) + world.open(1, 1, [Part("b", 0, 1)])
        return submits(opened + world.done(submits(opened)[0]))

    at_once, paused = granted(World()), granted(World(most=most))
    assert paused == at_once
    assert len(at_once) == 10


def test_a_paused_core_hands_the_rest_out_at_the_next_event():
    flow = World().flow
    flow.handle(SessionOpened(0, (LayerShape(0, 10),) * 5), 1.0)
    first = submits(flow.handle(StepOpened(0, 1, 9.0, 9.0, (Part("a", 0, 2),), ()), 1.0, 2))
    assert [batch.layer for batch in first] == [0, 1] and flow.paused
    flow.validate()
    assert [batch.layer for batch in submits(flow.handle(Tick(), 1.0))] == [2, 3, 4]
    assert not flow.paused
    flow.validate()


def test_saves_alone_are_granted_without_a_pause():
    flow = World().flow
    flow.handle(SessionOpened(0, (LayerShape(0, 10),) * 5), 1.0)
    assert len(submits(flow.handle(StepOpened(0, 1, 9.0, 9.0, (), (Part("a", 0, 2),)), 1.0, 2))) == 5
    assert not flow.paused


def test_wake_at_only_when_the_earliest_deadline_changes():
    world = World()
    world.open_session(0, [(0, 10)])
    assert [c.when for c in of(world.open(0, 1, [Part("a", 0, 1)], deadline=500.0, save_deadline=600.0), WakeAt)] == [
        500.0
    ]
    assert of(world.open(0, 2, [Part("a", 0, 1)], deadline=700.0, save_deadline=700.0), WakeAt) == []
    assert [c.when for c in of(world.open(0, 3, [Part("a", 0, 1)], deadline=400.0), WakeAt)] == [400.0]
    (third,) = [s for s in world.flying.values() if s.step == 3]
    assert [c.when for c in of(world.done(third), WakeAt)] == [500.0]


@pytest.mark.parametrize(
    "limits",
    [Limits(max_transfer_blocks=0), Limits(max_transfer_bytes=0), Limits(max_granted_bytes=1), Limits(stagger_us=-1)],
)
def test_impossible_limits_are_refused_and_change_nothing(limits):
    with pytest.raises(ConfigError):
        Flow(limits)
    world = World()
    world.open_session(0, [(0, 10)])
    with pytest.raises(ConfigError):
        world.flow.handle(LimitsChanged(limits), 1.0)
    assert len(submits(world.open(0, 1, [Part("a", 0, 9)]))) == 1


def test_loads_of_an_engine_that_is_stopped_leave_room_for_what_another_one_saves():
    """A decoder that takes its grants and reports nothing must not hold up its prefiller."""
    world = World(Limits(max_granted_bytes=80, max_transfer_bytes=10))
    for session in range(2):
        world.open_session(session, [(0, 10)] * 3)
    stopped = submits(world.open(0, 1, [Part("a", 0, 9)]))
    assert len(stopped) == 7
    saved = submits(world.open(1, 2, (), [Part("b", 0, 2)]) + world.send(LayersComputed(1, 2, 3)), SAVE)
    count = 0
    while saved:
        count += 1
        saved += submits(world.done(saved.pop(0)), SAVE)
    assert count == 6, "all three layers of both blocks are stored, one batch after the other"
    world.drain()

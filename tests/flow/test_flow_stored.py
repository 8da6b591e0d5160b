"""How far saves are, for whoever asked to be told: by layer, only what is true, all of it before the commit."""

from __future__ import annotations

from flow_world import SAVE, World, of, submits

from layerflow.flow.commands import Commit, LayersStored, Revoke
from layerflow.flow.events import LayersComputed, Limits, Part, RequestAborted, SessionLost, StepClosed, Tick


def told(commands):
    return [(c.group, c.layers) for c in of(commands, LayersStored)]


def saving(parts, layers=3, limits=None, tell=True):
    world = World(limits)
    world.open_session(0, [(0, 10)] * layers)
    saves = submits(world.open(0, 1, (), parts, save_deadline=200.0, tell=tell), SAVE)
    return world, saves + submits(world.send(LayersComputed(0, 1, layers)), SAVE)


def test_each_layer_is_told_once_and_the_last_before_the_commit():
    world, saves = saving([Part("a", 0, 2), Part("b", 0, 1)])
    outs = [world.done(batch) for batch in saves]
    assert [told(out) for out in outs] == [[(0, 1)], [(0, 2)], [(0, 3)]]
    assert [type(c) for c in outs[-1][:2]] == [LayersStored, Commit]


def test_nothing_is_told_unasked():
    world, saves = saving([Part("a", 0, 2)], tell=False)
    assert [told(world.done(batch)) for batch in saves] == [[], [], []]


def test_a_layer_is_told_with_its_last_batch_and_with_all_before_it():
    world, saves = saving([Part("a", 0, 2)], limits=Limits(max_transfer_blocks=1))
    assert [(s.layer, s.lo) for s in saves] == [(layer, block) for layer in range(3) for block in (0, 1)]
    first, *rest = saves
    assert [told(world.done(batch)) for batch in rest] == [[]] * 5
    assert told(world.done(first)) == [(0, 3)]


def test_a_layer_that_is_not_carved_yet_is_not_stored():
    world, saves = saving([Part("a", 0, 4)], limits=Limits(max_transfer_blocks=1, max_inflight_bytes=40))
    assert [(s.layer, s.lo) for s in saves] == [(0, 0), (0, 1)]
    said = []
    while world.flying:
        said += told(world.done(next(iter(world.flying.values()))))
    assert said == [(0, 1), (0, 2), (0, 3)]


def test_groups_are_told_apart():
    world = World()
    world.open_session(0, [(0, 10), (1, 4), (0, 10)])
    world.open(0, 1, (), [Part("a", 0, 1), Part("a", 1, 1)], tell=True)
    world.send(LayersComputed(0, 1, 3))
    assert [told(world.done(batch)) for batch in list(world.flying.values())] == [[(0, 1)], [(1, 1)], [(0, 2)]]


def test_a_held_commit_does_not_hold_back_what_is_stored():
    world = World()
    world.open_session(0, [(0, 10)])
    load, save = submits(world.open(0, 1, [Part("a", 0, 1)], [Part("a", 0, 1)], tell=True))
    world.send(LayersComputed(0, 1, 1))
    out = world.done(save)
    assert told(out) == [(0, 1)] and not of(out, Commit)
    out = world.done(load)
    assert of(out, Commit) and not told(out)


def test_the_death_of_what_was_missing_tells_of_the_rest():
    world, saves = saving(
        [Part("a", 0, 1), Part("b", 0, 1)], layers=1, limits=Limits(max_transfer_blocks=1, max_inflight_bytes=40)
    )
    first, second = saves
    assert not told(world.done(first))
    out = world.fail(second)
    assert told(out) == [(0, 1)] and of(out, Commit)[0].parts == (0,) and of(out, Revoke)[0].parts == (1,)


def test_an_abort_of_what_was_not_carved_tells_of_the_rest():
    world = World(Limits(max_transfer_blocks=1, max_inflight_bytes=40))
    world.open_session(0, [(0, 10)] * 2)
    (save,) = submits(world.open(0, 1, (), [Part("a", 0, 1), Part("b", 0, 1)], tell=True))
    assert len(submits(world.open(0, 2, [Part("c", 0, 2)]))) == 3
    world.send(LayersComputed(0, 1, 2))
    out = world.done(save)
    assert not told(out) and not submits(out, SAVE)  # loads have all the room
    assert told(world.send(RequestAborted(0, "b"))) == [(0, 1)]
    world.drain()


def test_the_dead_are_not_told_of():
    world, saves = saving([Part("a", 0, 1)])
    assert told(world.done(saves[0])) == [(0, 1)]
    world.send(RequestAborted(0, "a"))
    assert [told(world.done(batch)) for batch in saves[1:]] == [[], []]


def test_saves_past_their_deadline_are_not_told_of():
    world, saves = saving([Part("a", 0, 1)])
    world.now = 200.0
    assert not told(world.send(Tick()))
    assert [told(world.done(batch)) for batch in saves] == [[], [], []]


def test_a_lost_session_is_not_told_of():
    world, _ = saving([Part("a", 0, 1)])
    assert not told(world.send(SessionLost(0)))


def test_a_failed_forward_pass_tells_of_groups_that_have_their_layers():
    world = World()
    world.open_session(0, [(0, 10), (1, 10), (1, 10)])
    saves = submits(world.open(0, 1, (), [Part("a", 0, 1), Part("a", 1, 1)], tell=True))
    world.send(LayersComputed(0, 1, 2))
    world.send(StepClosed(0, 1, False))
    assert [told(world.done(batch)) for batch in saves[:2]] == [[(0, 1)], []]
    assert not told(world.fail(saves[2]))

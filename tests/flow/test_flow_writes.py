"""Writes to the backend: behind the saves layer by layer, published once committed, given up with their parts."""

from __future__ import annotations

import pytest
from flow_world import SAVE, World, of, submits

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Call, Commit, ObjectsLost, ObjectsPublished, Revoke, TransferDone, WriteBegun
from layerflow.flow.events import (
    HostLost,
    Item,
    LayersComputed,
    Limits,
    Part,
    RequestAborted,
    SessionLost,
    StepClosed,
    StepsRevoked,
    Tick,
    WriteOpened,
    WritesRevoked,
)


def moved(commands):
    """Layers and objects of each call."""
    return [(c.layer_lo, c.layer_hi, c.lo, c.hi) for c in of(commands, Call)]


def saving(parts, layers=3, limits=None, groups=None):
    world = World(limits)
    world.open_session(0, groups or [(0, 10)] * layers)
    said = world.open(0, 1, (), parts, save_deadline=200.0, write=True)
    said += world.send(LayersComputed(0, 1, len(world.layers[0])))
    return world, submits(said, SAVE), said


def test_each_layer_is_written_once_it_is_stored_and_all_is_published_after_the_commit():
    world, saves, said = saving([Part("a", 0, 2), Part("b", 0, 1)])
    assert of(said, WriteBegun) and not of(said, Call), "the host is told before there is anything to move"
    outs = [world.done(batch) for batch in saves]
    assert [moved(out) for out in outs] == [[(0, 1, 0, 2)], [(1, 2, 0, 2)], [(2, 3, 0, 2)]]
    assert of(outs[-1], Commit)
    calls = list(world.writes.calls.values())
    assert [moved(world.end_call(call)) for call in calls] == [[], [], [(3, 3, 0, 2)]]
    out = world.written()
    assert of(out, ObjectsPublished)[0].objects == (0, 1) and of(out, TransferDone)
    assert (world.flow.statistics().written_objects, world.flow.statistics().written_bytes) == (2, 9)
    world.drain()


def test_layers_that_were_stored_meanwhile_are_one_call():
    world, saves, _ = saving([Part("a", 0, 2)], layers=8)
    for batch in saves[:6]:
        world.done(batch)
    assert len(world.writes.calls) == 3, "so many calls ahead"
    out = world.end_call(next(iter(world.writes.calls.values())))
    assert moved(out) == [(3, 6, 0, 1)]
    world.drain()


def test_calls_keep_the_caps_and_the_budget():
    limits = Limits(max_transfer_bytes=16, max_transfer_blocks=8, max_granted_bytes=40)
    world = World(limits)
    world.open_session(0, [(0, 1)] * 4)
    parts = [Part(name, 0, 2) for name in "abcd"]
    world.open(0, 1, (), parts)
    said = world.write(0, 1, 0, parts, size=4)
    world.send(LayersComputed(0, 1, 4))
    while world.flying:
        said += world.done(next(iter(world.flying.values())))
    said += world.written()
    sizes = [call.nbytes for call in of(said, Call)]
    assert max(sizes) == 16 and sum(sizes) == 4 * 4 * 8, "the model checks what is in flight"
    world.drain()


def test_sources_take_turns():
    world = World(Limits(max_transfer_bytes=10, max_granted_bytes=20))
    world.open_session(0, [(0, 1)] * 6)
    parts = [Part("a", 0, 1)]
    for step, source in ((1, "x"), (2, "x"), (3, "y")):
        world.open(0, step, (), parts)
        world.write(0, step, 0, parts, source=source, size=10)
        world.send(LayersComputed(0, step, 6))
    while world.flying:
        world.done(next(iter(world.flying.values())))
    order = []
    while world.writes.calls:
        call = next(iter(world.writes.calls.values()))
        order.append(call.transfer)
        world.end_call(call)
    assert order.index(3) < order.index(2), "the other engine does not wait for all of the first one's"
    world.drain()


def test_a_layer_that_is_not_granted_yet_is_not_written():
    world, saves, _ = saving([Part("a", 0, 4)], limits=Limits(max_transfer_blocks=1, max_granted_bytes=40))
    assert [(s.layer, s.lo) for s in saves] == [(0, 0), (0, 1)]
    said = []
    while world.flying:
        said += world.done(next(iter(world.flying.values())))
        said += world.written()
    assert moved(said) == [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1), (3, 3, 0, 1)]


def test_groups_are_written_apart():
    world, saves, _ = saving([Part("a", 0, 1), Part("a", 1, 1)], groups=[(0, 10), (1, 4), (0, 10)])
    said = [command for batch in saves for command in world.done(batch)]
    assert [(c.transfer, c.layer_lo, c.layer_hi) for c in of(said, Call)] == [(1, 0, 1), (2, 0, 1), (1, 1, 2)]
    world.drain()
    assert all(write.whole for write in world.writes.all.values())


def test_a_held_commit_holds_back_what_is_published_and_not_what_is_written():
    world = World()
    world.open_session(0, [(0, 10)])
    load, save = submits(world.open(0, 1, [Part("a", 0, 1)], [Part("a", 0, 1)]))
    world.write(0, 1, 0, [Part("a", 0, 1)])
    world.send(LayersComputed(0, 1, 1))
    assert moved(world.done(save)) == [(0, 1, 0, 1)]
    assert not moved(world.written())
    assert moved(world.done(load)) == [(1, 1, 0, 1)]
    world.drain()


def test_a_part_that_fails_takes_its_objects_along_and_no_others():
    limits = Limits(max_transfer_blocks=1, max_granted_bytes=40)
    world, (first, second), _ = saving([Part("a", 0, 1), Part("b", 0, 1)], layers=1, limits=limits)
    assert not moved(world.done(first))
    out = world.fail(second)
    assert of(out, Revoke)[0].parts == (1,) and of(out, ObjectsLost)[0].objects == (1,)
    assert moved(out) == [(0, 1, 0, 2)], "the lost one is left out"
    world.drain()
    assert world.writes.all[1].whole == {0}


def test_an_abort_gives_up_what_the_request_saves():
    world, saves, _ = saving([Part("a", 0, 1), Part("b", 0, 1)])
    world.done(saves[0])
    world.send(RequestAborted(0, "b"))
    world.drain()
    assert world.writes.all[1].whole == {0} and set(world.writes.all[1].lost) == {1}


def test_what_is_being_published_is_not_published_twice_nor_lost_silently():
    world, saves, _ = saving([Part("a", 0, 1)], layers=1)
    world.done(saves[0])
    (call,) = world.writes.calls.values()
    world.end_call(call)
    (publish,) = world.writes.calls.values()
    out = world.end_call(publish, 0, reason="no replica")
    assert of(out, ObjectsLost)[0].reason == "no replica" and of(out, TransferDone) and not of(out, ObjectsPublished)
    world.drain()


@pytest.mark.parametrize("event", [WritesRevoked("purged"), HostLost("signal 9")])
def test_writes_end_with_their_host_and_when_they_are_revoked_even_if_committed(event):
    world, saves, _ = saving([Part("a", 0, 1)])
    for batch in saves:
        world.done(batch)
    out = world.send(event)
    assert of(out, ObjectsLost)[0].objects == (0,)
    assert bool(of(out, TransferDone)) == isinstance(event, HostLost), "calls under way are awaited"
    assert of(world.written(), TransferDone) or isinstance(event, HostLost)
    world.drain()


@pytest.mark.parametrize("end", ["deadline", "session", "revoked", "failed pass"])
def test_writes_end_with_the_saves_that_they_follow(end):
    world, saves, _ = saving([Part("a", 0, 1)])
    world.done(saves[0])
    if end == "deadline":
        world.now = 200.0
        world.send(Tick())
    elif end == "session":
        world.send(SessionLost(0))
    elif end == "revoked":
        world.send(StepsRevoked(0, False, "replaced"))
    else:
        world.send(RequestAborted(0, "a"))
        world.send(StepClosed(0, 1, False))
    for batch in list(world.flying.values()):
        world.done(batch)
    world.written()
    assert world.writes.all[1].done and not world.writes.all[1].whole
    world.drain()


def test_what_the_backlog_has_no_room_for_waits_for_its_first_layer_and_is_shed_then():
    world = World(Limits(write_backlog_bytes=3))
    world.open_session(0, [(0, 10)] * 2)
    parts = [Part("a", 0, 1)]
    first = world.open(0, 1, (), parts, write=True)
    second, third = (world.open(0, step, (), parts, write=True) for step in (2, 3))
    assert of(first, WriteBegun) and not of(second, WriteBegun) and not of(third, WriteBegun)
    said = world.send(LayersComputed(0, 2, 2))
    for batch in [batch for batch in world.flying.values() if batch.step == 2]:
        said += world.done(batch)
    assert of(said, ObjectsLost)[0].reason == "shed" and of(said, Commit), "the arena keeps it"
    world.send(LayersComputed(0, 1, 2))
    for batch in [batch for batch in world.flying.values() if batch.step == 1]:
        world.done(batch)
    world.written()
    world.send(LayersComputed(0, 3, 2))
    assert of(world.done(next(iter(world.flying.values()))), WriteBegun), "there is room by now"
    world.drain()
    assert world.flow.statistics().shed_writes == 1


def test_a_write_of_a_step_that_saves_nothing_ends_at_once():
    world = World(Limits(save_backlog_bytes=1))
    world.open_session(0, [(0, 10)])
    said = world.open(0, 1, (), [Part("a", 0, 1)], write=True)
    assert of(said, Revoke) and of(said, ObjectsLost) and of(said, TransferDone)
    world.drain()


def test_a_write_of_other_parts_or_a_second_one_of_the_same_is_refused():
    world, _, _ = saving([Part("a", 0, 1)])
    for write in (WriteOpened(1, "e", 0, 1, 0, (Item(1, 1),), (0,)), WriteOpened(2, "e", 0, 1, 0, (Item(1, 1),), (0,))):
        with pytest.raises(InvalidTransition):
            world.flow.handle(write, world.now)
    world.open(0, 2, (), [Part("a", 0, 1)])
    with pytest.raises(InvalidTransition, match="no such parts"):
        world.flow.handle(WriteOpened(3, "e", 0, 2, 0, (Item(1, 1),), (1,)), world.now)
    world.drain()


def test_what_is_aborted_and_not_drained_is_not_published_with_the_rest():
    world = World()
    world.open_session(0, [(0, 10), (1, 10)])
    saves = [Part("a", 0, 1), Part("b", 0, 1), Part("a", 1, 1)]
    world.open(0, 1, (), saves, write=True)
    world.send(LayersComputed(0, 1, 2))
    world.send(RequestAborted(0, "a"))
    first, _ = world.flying.values()
    out = world.done(first)
    assert of(out, Commit)[0].parts == (1,) and not of(out, Revoke), "group 1 still reads what is aborted"
    assert of(world.written(), ObjectsPublished)[0].objects == (1,)
    world.drain()


def test_the_death_of_what_was_not_granted_lets_the_rest_be_written():
    world = World(Limits(max_transfer_blocks=1, max_granted_bytes=40))
    world.open_session(0, [(0, 10)] * 2)
    (save,) = submits(world.open(0, 1, (), [Part("a", 0, 1), Part("b", 0, 1)], write=True))
    assert len(submits(world.open(0, 2, [Part("c", 0, 2)]))) == 3
    world.send(LayersComputed(0, 1, 2))
    out = world.done(save)
    assert not of(out, Call) and not submits(out, SAVE), "loads have all the room"
    assert moved(world.send(RequestAborted(0, "b"))) == [(0, 1, 0, 2)], "the lost one is left out"
    world.drain()

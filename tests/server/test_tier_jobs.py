"""Fetches and writes of the tier: what the arena, the core and the host are told, whatever the host answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from layerflow.flow import Flow
from layerflow.flow.commands import Arrived, Call, Command, FetchLost, LoadFailed, LoadsDone, TransferDone, Vacate
from layerflow.flow.events import (
    Event,
    HostLost,
    LayerShape,
    Limits,
    LoadsFenced,
    Need,
    Part,
    SessionLost,
    SessionOpened,
    StepOpened,
)
from layerflow.hosts.backend import ObjectStatus
from layerflow.keys import KEY_BYTES
from layerflow.objects import HEADER_BYTES
from layerflow.pool.arena import Arena
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.tier.fetches import Fetches
from layerflow.server.tier.writes import Writes
from layerflow.wire.host_messages import (
    Advance,
    Drop,
    EndFetch,
    Fetch,
    Fetched,
    Finish,
    ObjectFailure,
    Pull,
    ToHost,
    Write,
    Written,
    split_keys,
    unpack_u32,
    unpack_u64,
)

LAYERS = 4
NBYTES = HEADER_BYTES + LAYERS * 1024
STEP = (7, 1)


def key(name: int) -> bytes:
    return name.to_bytes(KEY_BYTES, "big")


def new(name: int) -> NewObject:
    return NewObject(key(name), NBYTES, 2, 32)


class World:
    """A pool of `room` objects, the core, and a host that only listens. One session, of four layers."""

    def __init__(self, room: int = 8, backlog: int = 1 << 30) -> None:
        self.pool = MemoryPool(Arena(room * (NBYTES + 4096)))
        self.flow = Flow(Limits())
        self.sent: list[ToHost] = []
        self.commands: list[Command] = []
        self.failed: list[tuple[bytes, int]] = []
        self.written: list[bytes] = []
        self.alive = True
        self.fetches = Fetches(self.pool, self.send, self.emit, self.fail)
        self.writes = Writes(self.pool, backlog, self.send, lambda one: self.written.append(one.key), self.fail)
        self.emit([SessionOpened(STEP[0], (LayerShape(0, 512),) * LAYERS)])

    def emit(self, events: Sequence[Event]) -> None:
        """As the driver does."""
        for event in events:
            for command in self.flow.handle(event, 0.0):
                self.commands.append(command)
                match command:
                    case Call() | Arrived() | FetchLost() | Vacate() | TransferDone():
                        self.fetches.obey(command)
                    case LoadsDone():
                        self.pool.release(("step", command.session, command.step))
            self.flow.validate()

    def send(self, message: ToHost) -> bool:
        if self.alive:
            self.sent.append(message)
        return self.alive

    def fail(self, name: bytes, outcome: int, reason: str) -> None:
        self.failed.append((name, outcome))

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def begin(self, *names: int) -> Fetch:
        self.fetches.begin([new(name) for name in names], range(LAYERS), "engine")
        return self.said(Fetch)[-1]

    def step(self, *names: int, deadline: float = 9.0) -> None:
        """A step loads these."""
        places = [self.fetches.coming(key(name)) for name in names]
        needs = tuple(Need(one.job.number, one.position, 2 * at, 2 * at + 2) for at, one in enumerate(places))
        self.emit([StepOpened(*STEP, deadline, deadline, (Part("r", 0, 2 * len(names), needs),))])

    def heard(self, *failed: ObjectFailure) -> None:
        """The host ends its oldest call."""
        ended = len(self.said(Fetched))
        pull = self.said(Pull)[ended]
        report = Fetched(pull.id, pull.call, failed)
        self.sent.append(report)  # so that the next one is counted
        self.fetches.heard(report)

    def save(self, *names: int, until: float = 9.0, now: float = 0.0) -> list[tuple[NewObject, int]]:
        objects = [new(name) for name in names]
        reserved = self.pool.reserve(objects, "saver")
        placed = [(one, place.offset) for one, place in zip(objects, reserved, strict=True)]
        self.writes.plan(STEP, 0, LAYERS, placed, until, now)
        return placed


@pytest.fixture
def world():
    world = World()
    yield world
    world.pool.validate()


def test_what_comes_is_in_the_arena_once_whole_and_leaves_the_book(world):
    fetch = world.begin(1, 2)
    assert split_keys(fetch.objects.keys) == [key(1), key(2)]
    assert unpack_u64(fetch.objects.layer_bytes) == [1024, 1024]
    assert unpack_u64(fetch.objects.offsets) == [world.fetches.coming(key(name)).offset for name in (1, 2)]
    assert world.said(Pull) == [Pull(fetch.id, 1, 0, 2, 0, LAYERS)]
    assert world.pool.lookup([key(1), key(2)]) == [False, False]
    world.heard()
    assert world.pool.lookup([key(1), key(2)]) == [True, True]
    assert key(1) not in world.fetches and len(world.fetches) == 0
    assert world.said(EndFetch) == [EndFetch(fetch.id)] and world.fetches.fetched_objects == 2


def test_what_a_step_loads_is_pinned_until_its_loads_are_done(world):
    world.begin(1, 2)
    world.step(1)
    world.heard()
    assert world.pool.statistics().pinned == 1
    world.emit([LoadsFenced(*STEP, "cut")])
    assert world.pool.statistics().pinned == 1, "a batch may be reading it"
    world.emit([SessionLost(STEP[0])])
    assert world.pool.statistics().pinned == 0


def test_a_step_whose_deadline_has_passed_pins_nothing(world):
    world.begin(1)
    world.step(1, deadline=-1.0)
    assert any(isinstance(command, LoadsDone) for command in world.commands)
    world.heard()
    assert world.pool.lookup([key(1)]) == [True] and world.pool.statistics().pinned == 0


def test_one_bad_object_fails_its_blocks_and_leaves_the_others(world):
    world.begin(1, 2)
    world.step(1, 2)
    world.heard(ObjectFailure(0, ObjectStatus.EXPIRED, "lease"))
    [lost] = [command for command in world.commands if isinstance(command, LoadFailed)]
    assert (lost.lo, lost.hi, lost.reason) == (0, 2, "not fetched: lease")
    assert world.failed == [(key(1), ObjectStatus.EXPIRED)]
    assert world.pool.lookup([key(1), key(2)]) == [False, True] and key(1) not in world.fetches
    assert world.pool.statistics().half_written == 1, "the step may be copying layers of it"
    world.emit([SessionLost(STEP[0])])
    assert world.pool.statistics().half_written == 0


def test_the_death_of_the_host_fails_exactly_what_it_carried(world):
    world.begin(1)
    world.heard()
    world.begin(2)
    world.step(2)
    world.save(3)
    world.writes.stored(STEP, 0, 1, 0.0)
    assert world.fetches.coming_objects == 1
    world.emit([HostLost("the host process is gone: signal 9")])
    world.writes.host_lost("signal 9")
    [lost] = [command for command in world.commands if isinstance(command, LoadFailed)]
    assert lost.reason == "not fetched: the host process is gone: signal 9"
    assert world.failed == [(key(3), ObjectStatus.FAILED)], "a dead host is no fault of the object that it was fetching"
    assert world.pool.lookup([key(1)]) == [True]
    assert world.pool.statistics().half_written == 1, "the step still saves into the arena"
    assert world.writes.backlog_bytes == 0 and world.fetches.coming_objects == 0


def test_leases_hold_what_has_come_until_they_run_out(world):
    world.begin(1, 2)
    world.fetches.lease([key(1)], "request", 5.0)
    world.heard()
    assert world.pool.statistics().pinned == 1
    assert world.pool.expire(5.0) == 1


def test_a_lease_of_what_is_loaded_is_not_taken_up_again_when_it_has_come(world):
    world.begin(1, 2)
    world.fetches.lease([key(1), key(2)], "request", 5.0)
    world.step(1)
    world.fetches.drop_lease("request", [key(1)])
    world.heard()
    world.emit([SessionLost(STEP[0])])
    assert world.pool.statistics().pinned == 1, "only what the request has not loaded"


@pytest.mark.parametrize("how", ["dropped", "its engine is gone"])
def test_what_nobody_wants_any_more_is_let_go(world, how):
    world.begin(1)
    world.fetches.lease([key(1)], ("lease", "engine", "request"), 5.0)
    match how:
        case "dropped":
            world.fetches.drop_lease(("lease", "engine", "request"))
        case "its engine is gone":
            world.fetches.drop_leases(lambda owner: owner[:2] == ("lease", "another"))
            assert world.flow.statistics().fetches == 1
            world.fetches.drop_leases(lambda owner: owner[:2] == ("lease", "engine"))
    world.heard(ObjectFailure(0, ObjectStatus.FAILED, "the host is slow"))
    assert key(1) not in world.fetches and world.pool.statistics().half_written == 0
    assert world.said(EndFetch) and len(world.fetches) == 0 and world.flow.statistics().fetches == 0


def test_what_is_revoked_is_never_published_and_can_be_fetched_again(world):
    world.begin(1, 2)
    world.step(1)
    world.fetches.lease([key(1), key(2)], "request", 5.0)
    assert world.fetches.lease_owners() == {"request"}
    assert world.fetches.revoke("new weights") == 2
    [lost] = [command for command in world.commands if isinstance(command, LoadFailed)]
    assert lost.reason == "not fetched: new weights" and key(1) not in world.fetches
    assert world.pool.statistics().half_written == 2, "the host is still at it"
    world.heard()
    assert world.pool.lookup([key(1), key(2)]) == [False, False] and world.pool.statistics().half_written == 0
    world.begin(1)
    world.heard()
    assert world.pool.lookup([key(1)]) == [True] and world.failed == []


def test_what_finds_no_room_stays_where_it_is():
    world = World(room=2)
    world.pool.reserve([new(90)], "somebody")
    world.fetches.begin([new(name) for name in range(4)], range(LAYERS), "engine")
    coming = [name for name in range(4) if key(name) in world.fetches]
    assert 0 < len(coming) < 4 and world.fetches.refused == 4 - len(coming)


def test_without_a_host_nothing_begins(world):
    world.alive = False
    world.fetches.begin([new(1)], range(LAYERS), "engine")
    assert key(1) not in world.fetches and world.pool.statistics().half_written == 0
    world.save(2)
    assert world.writes.shed_objects == 1 and len(world.writes) == 0


def test_a_write_follows_the_layers_and_ends_with_the_commit(world):
    world.save(1, 2, now=4.0)
    [write] = world.said(Write)
    assert world.writes.planned(STEP)
    assert write.layers == 0 and write.timeout_ms == 5000
    for stored in (1, 1, 3):
        world.writes.stored(STEP, 0, stored, 4.0)
    assert world.said(Advance) == [Advance(write.id, 1), Advance(write.id, 3)]
    world.pool.commit([key(1), key(2)], "saver")
    world.writes.committed(STEP, [key(1), key(2)])
    assert world.sent[-1] == Finish(write.id)
    assert world.pool.statistics().pinned == 2 and world.writes.backlog_bytes == 2 * NBYTES
    world.writes.forget_step(STEP)
    world.writes.heard(Written(write.id, (ObjectFailure(1, ObjectStatus.EXISTS, ""),)))
    assert world.pool.statistics().pinned == 0 and world.writes.backlog_bytes == 0
    assert world.written == [key(1)] and world.failed == [(key(2), ObjectStatus.EXISTS)]
    assert world.writes.written_bytes == NBYTES


def test_what_was_revoked_is_dropped_before_and_after_the_write_began(world):
    world = World(backlog=4 * NBYTES - 1)
    world.save(1, 2, 3, 4)
    assert not world.said(Write), "there is no room for it before something of it is dropped"
    world.writes.revoked(STEP, [key(2)])
    world.writes.stored(STEP, 0, 1, 0.0)
    [write] = world.said(Write)
    assert split_keys(write.objects.keys) == [key(1), key(3), key(4)] and write.layers == 1
    world.writes.revoked(STEP, [key(3)])
    world.pool.commit([key(1)], "saver")
    world.writes.committed(STEP, [key(1)])
    assert [unpack_u32(drop.positions) for drop in world.said(Drop)] == [[1], [2]]
    world.writes.heard(
        Written(write.id, (ObjectFailure(1, ObjectStatus.FAILED, "dropped"), ObjectFailure(2, ObjectStatus.FAILED, "")))
    )
    assert world.written == [key(1)] and world.failed == []


def test_a_step_that_ends_unfinished_leaves_nothing(world):
    world.save(1)
    world.writes.stored(STEP, 0, 2, 0.0)
    world.writes.forget_step(STEP)
    [write] = world.said(Write)
    assert [unpack_u32(drop.positions) for drop in world.said(Drop)] == [[0]]
    world.writes.heard(Written(write.id))
    assert world.written == [] and len(world.writes) == 0 and not world.writes.planned(STEP)


def test_past_the_backlog_objects_are_shed_whole():
    world = World(backlog=2 * NBYTES - 1)
    world.save(1, 2)
    assert world.writes.planned(STEP) and world.writes.shed_objects == 0, (
        "the backlog may be shorter by the first layer"
    )
    world.writes.stored(STEP, 0, 1, 0.0)
    assert world.writes.shed_objects == 2 and not world.sent and not world.writes.planned(STEP)


async def test_draining_ends_with_the_last_write(world):
    world.save(1)
    world.writes.stored(STEP, 0, LAYERS, 0.0)
    world.pool.commit([key(1)], "saver")
    world.writes.committed(STEP, [key(1)])
    [write] = world.said(Write)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.writes.idle)
        await anyio.lowlevel.checkpoint()
        world.writes.heard(Written(write.id))
    assert world.written == [key(1)]


def test_who_waits_for_writes_hears_of_their_end_whatever_it_was(world):
    ended: list[str] = []

    def wait(what: str, *names: int) -> None:
        world.writes.when_ended([key(name) for name in names], lambda: ended.append(what))

    wait("unknown", 9)
    assert ended == ["unknown"], "nothing of it is on its way"
    world.save(1, 2)
    world.writes.plan((7, 2), 0, LAYERS, [(new(3), 0)], 9.0, 0.0)
    first, second = world.said(Write)
    wait("both", 1, 3)
    wait("second", 3)
    world.writes.committed(STEP, [key(1), key(2)])
    assert ended == ["unknown"]
    world.writes.heard(Written(first.id))
    assert ended == ["unknown"]
    world.writes.revoked((7, 2), [key(3)])
    world.writes.heard(Written(second.id, (ObjectFailure(0, ObjectStatus.FAILED, "dropped"),)))
    assert ended == ["unknown", "both", "second"]


def test_who_waits_for_a_write_that_is_shed_or_never_begins_hears_of_it(world):
    world.alive = False
    ended: list[str] = []
    world.writes.room = 0
    for step, name in (((7, 1), 1), ((7, 2), 2)):
        world.writes.plan(step, 0, LAYERS, [(new(name), 0)], 9.0, 0.0)
        world.writes.when_ended([key(name)], lambda name=name: ended.append(name))
    assert ended == []
    world.writes.stored((7, 1), 0, 1, 0.0)
    assert ended == [1] and world.writes.shed_objects == 1
    world.writes.forget_step((7, 2))
    assert ended == [1, 2]

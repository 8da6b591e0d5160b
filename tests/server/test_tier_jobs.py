"""Fetches and writes of the tier: what the arena, the core and the host are told, whatever the host answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from layerflow.flow import Flow
from layerflow.flow.commands import (
    Arrived,
    Call,
    Command,
    Commit,
    LoadFailed,
    LoadsDone,
    ObjectsLost,
    Revoke,
    RoomFreed,
    Submit,
    TransferDone,
    WriteBegun,
)
from layerflow.flow.commands import ObjectsPublished as WrittenCommand
from layerflow.flow.events import (
    BatchDone,
    Event,
    Hop,
    HostLost,
    LayersComputed,
    LayerShape,
    Limits,
    LoadsFenced,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
)
from layerflow.hosts.backend import ObjectStatus
from layerflow.keys import KEY_BYTES
from layerflow.objects import HEADER_BYTES
from layerflow.pool.arena import Arena
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.incoming import IncomingFetches, IncomingObjects
from layerflow.server.tier.writes import Writes
from layerflow.wire.host_messages import (
    Drop,
    EndFetch,
    EndWrite,
    Fetch,
    Fetched,
    ObjectFailure,
    Pull,
    Push,
    ToHost,
    Write,
    Written,
    split_keys,
)
from layerflow.wire.packing import list_u32, list_u64

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
        self.flow = Flow(Limits(write_backlog_bytes=backlog))
        self.sent: list[ToHost] = []
        self.commands: list[Command] = []
        self.failed: list[tuple[bytes, int]] = []
        self.written: list[bytes] = []
        self.alive = True
        self.incoming = IncomingObjects(self.pool, self.emit)
        self.fetches = IncomingFetches(self.incoming, self.send, self.fail)
        self.writes = Writes(self.pool, self.send, self.emit, lambda one: self.written.append(one.key), self.fail)
        self.batches: list[Submit] = []
        self.saved: dict[tuple[int, int], list[bytes]] = {}
        self.ended_calls = 0
        self.emit([SessionOpened(STEP[0], (LayerShape(0, 512),) * LAYERS)])

    def emit(self, events: Sequence[Event]) -> None:
        """As the driver does."""
        for event in events:
            for command in self.flow.handle(event, 0.0):
                self.commands.append(command)
                match command:
                    case Arrived() | RoomFreed() | Call(hop=Hop.FETCH):
                        self.incoming.obey(command)
                    case ObjectsLost(hop=Hop.FETCH) | TransferDone(hop=Hop.FETCH):
                        self.incoming.obey(command)
                    case Call() | ObjectsLost() | TransferDone() | WriteBegun() | WrittenCommand():
                        self.writes.obey(command)
                    case Submit():
                        self.batches.append(command)
                    case Commit() | Revoke():
                        self._settle(command)
                    case LoadsDone():
                        self.pool.release(("step", command.session, command.step))
            self.flow.validate()

    def _settle(self, command: Commit | Revoke) -> None:
        step = (command.session, command.step)
        keys = [self.saved[step][part] for part in command.parts]
        if isinstance(command, Commit):
            self.pool.commit(keys, ("step", *step))
            self.writes.committed(step, keys)
        else:
            self.pool.revoke(keys, ("step", *step))

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
        self.fetches.call_ended(report)

    def save(self, *names: int, step: int = 1) -> None:
        """A step is about to save these, a request each."""
        objects, key_of_step = [new(name) for name in names], (STEP[0], step)
        reserved = self.pool.reserve(objects, ("step", *key_of_step))
        placed = [(one, place.offset) for one, place in zip(objects, reserved, strict=True)]
        self.saved[key_of_step] = [one.key for one in objects]
        opened = self.writes.plan(key_of_step, "engine", 0, layers=LAYERS, placed=placed, parts=range(len(names)))
        parts = tuple(Part(str(name), 0, 2) for name in names)
        self.emit([StepOpened(*key_of_step, 9.0, 9.0, (), parts), opened])

    def store(self, layers: int = LAYERS, step: int = 1) -> None:
        """So many layers of a step are computed, and saved in the arena."""
        self.emit([LayersComputed(STEP[0], step, layers)])
        mine = [batch for batch in self.batches if batch.step == step and batch.layer < layers]
        for batch in mine:
            self.batches.remove(batch)
            self.emit([BatchDone(batch.session, batch.batch)])

    def wrote(self, *failed: ObjectFailure) -> None:
        """The host ends its oldest call of a write."""
        push = self.said(Push)[self.ended_calls]
        self.ended_calls += 1
        self.writes.call_ended(Written(push.id, push.call, failed))

    def write_all(self) -> None:
        """The host ends all its calls of writes."""
        while self.ended_calls < len(self.said(Push)):
            self.wrote()


@pytest.fixture
def world():
    world = World()
    yield world
    world.pool.validate()


def test_what_comes_is_in_the_arena_once_whole_and_leaves_the_book(world):
    fetch = world.begin(1, 2)
    assert split_keys(fetch.objects.keys) == [key(1), key(2)]
    assert list_u64(fetch.objects.layer_bytes) == [1024, 1024]
    assert list_u64(fetch.objects.offsets) == [world.fetches.coming(key(name)).offset for name in (1, 2)]
    assert world.said(Pull) == [Pull(fetch.id, 1, 0, 2, 0, LAYERS)]
    assert world.pool.lookup([key(1), key(2)]) == [False, False]
    world.heard()
    assert world.pool.lookup([key(1), key(2)]) == [True, True]
    assert key(1) not in world.incoming.coming and len(world.fetches) == 0
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
    assert world.pool.lookup([key(1), key(2)]) == [False, True] and key(1) not in world.incoming.coming
    assert world.pool.statistics().half_written == 1, "the step may be copying layers of it"
    world.emit([SessionLost(STEP[0])])
    assert world.pool.statistics().half_written == 0


def test_the_death_of_the_host_fails_exactly_what_it_carried(world):
    world.begin(1)
    world.heard()
    world.begin(2)
    world.step(2)
    world.save(3, step=2)
    world.store(1, step=2)
    assert world.fetches.coming_objects == 1
    world.emit([HostLost("the host process is gone: signal 9")])
    [lost] = [command for command in world.commands if isinstance(command, LoadFailed)]
    assert lost.reason == "not fetched: the host process is gone: signal 9"
    assert world.failed == [] and len(world.writes) == 0, "a dead host is no fault of the objects that it carried"
    assert world.pool.lookup([key(1)]) == [True]
    assert world.pool.statistics().half_written == 1, "the step still saves into the arena"
    assert world.writes.backlog_bytes == 0 and world.fetches.coming_objects == 0


def test_leases_hold_what_has_come_until_they_run_out(world):
    world.begin(1, 2)
    world.incoming.lease([key(1)], "request", 5.0)
    world.heard()
    assert world.pool.statistics().pinned == 1
    assert world.pool.expire(5.0) == 1


def test_a_lease_of_what_is_loaded_is_not_taken_up_again_when_it_has_come(world):
    world.begin(1, 2)
    world.incoming.lease([key(1), key(2)], "request", 5.0)
    world.step(1)
    world.incoming.drop_lease("request", [key(1)])
    world.heard()
    world.emit([SessionLost(STEP[0])])
    assert world.pool.statistics().pinned == 1, "only what the request has not loaded"


@pytest.mark.parametrize("how", ["dropped", "its engine is gone"])
def test_what_nobody_wants_any_more_is_let_go(world, how):
    world.begin(1)
    world.incoming.lease([key(1)], ("lease", "engine", "request"), 5.0)
    match how:
        case "dropped":
            world.incoming.drop_lease(("lease", "engine", "request"))
        case "its engine is gone":
            world.incoming.drop_leases(lambda owner: owner[:2] == ("lease", "another"))
            assert world.flow.statistics().fetches == 1
            world.incoming.drop_leases(lambda owner: owner[:2] == ("lease", "engine"))
    world.heard(ObjectFailure(0, ObjectStatus.FAILED, "the host is slow"))
    assert key(1) not in world.incoming.coming and world.pool.statistics().half_written == 0
    assert world.said(EndFetch) and len(world.fetches) == 0 and world.flow.statistics().fetches == 0


def test_what_is_revoked_is_never_published_and_can_be_fetched_again(world):
    world.begin(1, 2)
    world.step(1)
    world.incoming.lease([key(1), key(2)], "request", 5.0)
    assert world.incoming.lease_owners() == {"request"}
    assert world.incoming.revoke("new weights") == 2
    [lost] = [command for command in world.commands if isinstance(command, LoadFailed)]
    assert lost.reason == "not fetched: new weights" and key(1) not in world.incoming.coming
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
    coming = [name for name in range(4) if key(name) in world.incoming.coming]
    assert 0 < len(coming) < 4 and world.fetches.refused == 4 - len(coming)


def test_without_a_host_nothing_begins(world):
    world.alive = False
    world.fetches.begin([new(1)], range(LAYERS), "engine")
    assert key(1) not in world.incoming.coming and world.pool.statistics().half_written == 0


def test_a_write_follows_the_layers_and_ends_after_the_commit(world):
    world.save(1, 2)
    [write] = world.said(Write)
    assert split_keys(write.objects.keys) == [key(1), key(2)] and not world.said(Push)
    world.store(1)
    world.store(3)
    assert world.said(Push) == [
        Push(write.id, 1, 0, 2, 0, 1),
        Push(write.id, 2, 0, 2, 1, 2),
        Push(write.id, 3, 0, 2, 2, 3),
    ]
    world.store()
    world.emit([StepClosed(*STEP, True)])
    assert world.pool.statistics().pinned == 2 and world.writes.backlog_bytes == 2 * NBYTES
    for _ in range(4):
        world.wrote()
    assert world.said(Push)[-1] == Push(write.id, 5, 0, 2, LAYERS, LAYERS)
    assert world.writes.pending_objects == 2 and not world.written
    world.wrote(ObjectFailure(1, ObjectStatus.EXISTS, ""))
    assert world.pool.statistics().pinned == 0 and world.writes.backlog_bytes == 0
    assert world.written == [key(1)] and world.failed == [(key(2), ObjectStatus.EXISTS)]
    assert world.writes.written_bytes == NBYTES and world.sent[-1] == EndWrite(write.id) and not world.said(Drop)


def test_what_was_aborted_is_dropped_and_its_room_is_free(world):
    world.save(1, 2, 3)
    world.store(1)
    world.emit([RequestAborted(STEP[0], "2")])
    [write] = world.said(Write)
    assert not world.said(Drop), "a batch may still write its room"
    world.store()
    assert [list_u32(drop.positions) for drop in world.said(Drop)] == [[1]]
    world.write_all()
    assert world.written == [key(1), key(3)] and world.failed == []
    assert world.said(EndWrite) == [EndWrite(write.id)] and world.pool.statistics().pinned == 0


def test_a_failure_that_the_host_has_told_is_not_told_back(world):
    world.save(1, 2)
    world.store(1)
    world.wrote(ObjectFailure(0, ObjectStatus.FULL, "no room"))
    world.wrote() if len(world.said(Push)) > world.ended_calls else None
    world.store()
    world.write_all()
    assert not world.said(Drop) and world.failed == [(key(1), ObjectStatus.FULL)] and world.written == [key(2)]


def test_a_session_that_is_lost_leaves_nothing(world):
    world.save(1)
    world.store(2)
    world.emit([SessionLost(STEP[0])])
    [write] = world.said(Write)
    assert [list_u32(drop.positions) for drop in world.said(Drop)] == [[0]]
    world.write_all()
    assert world.written == [] and len(world.writes) == 0 and world.sent[-1] == EndWrite(write.id)


def test_past_the_backlog_objects_are_shed_whole_and_stay_in_the_arena():
    world = World(backlog=2 * LAYERS * 1024 - 1)
    world.save(1, 2)
    assert world.writes.shed_objects == 0, "the backlog may be shorter by the first layer"
    world.store()
    assert world.writes.shed_objects == 2 and not world.sent and len(world.writes) == 0
    assert world.pool.lookup([key(1), key(2)]) == [True, True] and world.pool.statistics().pinned == 0


def test_a_purge_gives_up_what_is_committed_too(world):
    world.save(1)
    world.store()
    assert world.writes.revoke("purged") == 1
    world.write_all()
    assert world.written == [] and world.pool.statistics().pinned == 0 and len(world.writes) == 0


async def test_draining_ends_with_the_last_write(world):
    world.save(1)
    world.store()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.writes.idle)
        await anyio.lowlevel.checkpoint()
        world.write_all()
    assert world.written == [key(1)]


def test_who_waits_for_writes_hears_of_their_end_whatever_it_was(world):
    ended: list[str] = []

    def wait(what: str, *names: int) -> None:
        writes = world.writes.writing([key(name) for name in names])
        world.writes.when_ended(writes, lambda: ended.append(what))

    wait("unknown", 9)
    assert ended == ["unknown"], "nothing of it is on its way"
    world.save(1, 2)
    world.save(3, step=2)
    wait("both", 1, 3)
    wait("second", 3)
    world.store()
    assert ended == ["unknown"]
    world.write_all()
    assert ended == ["unknown"]
    world.emit([RequestAborted(STEP[0], "3")])
    assert ended == ["unknown"], "a batch may still write its room"
    world.store(step=2)
    assert ended == ["unknown", "both", "second"]


def test_who_waits_for_a_write_that_is_shed_or_never_begins_hears_of_it():
    world = World(backlog=0)
    ended: list[int] = []
    for step in (1, 2):
        world.save(step, step=step)
        world.writes.when_ended(world.writes.writing([key(step)]), lambda step=step: ended.append(step))
    assert ended == []
    world.store(1, step=1)
    assert ended == [1] and world.writes.shed_objects == 1
    world.emit([SessionLost(STEP[0])])
    assert ended == [1, 2]


def test_who_waits_for_writes_no_longer_is_not_kept_until_they_end(world):
    ended: list[int] = []
    world.save(1)
    world.save(2, step=2)
    writes = [world.writes.writing([key(name)]) for name in (1, 2)]
    forgets = [world.writes.when_ended(writes[n % 2], lambda n=n: ended.append(n)) for n in range(100)]
    for forget in forgets[1:]:
        forget()
    assert len(world.writes._waiters) == 1, "of the first one's job alone"
    world.store()
    world.store(step=2)
    world.write_all()
    assert ended == [0] and not world.writes._waiters


class Counted(bytes):
    """A key that counts how often one of them is looked for."""

    looked_for = 0

    def __hash__(self) -> int:
        Counted.looked_for += 1
        return bytes.__hash__(self)

    __eq__ = bytes.__eq__


def test_what_an_object_waits_for_is_found_without_a_look_at_the_others():
    world = World()
    for step in range(100):
        objects = [NewObject(Counted(key(100 * step + at)), NBYTES, 2, 32) for at in range(100)]
        placed = [(one, 0) for one in objects]
        world.writes.plan((7, step), "engine", 0, layers=LAYERS, placed=placed, parts=range(100))
    Counted.looked_for = 0
    first, last = world.writes.writing([key(0)]), world.writes.writing([key(9999), key(9950), key(10_000)])
    assert len(first) == len(last) == 1 and first != last
    assert Counted.looked_for == 0


def test_an_object_that_two_writes_carry_is_waited_for_until_both_have_ended(world):
    ended: list[str] = []
    world.save(1)
    world.pool.revoke([key(1)], ("step", *STEP))
    world.save(1, step=2)
    writes = world.writes.writing([key(1)])
    assert len(writes) == 2
    world.writes.when_ended(writes, lambda: ended.append("both"))
    world.store(step=2)
    world.write_all()
    assert ended == [] and len(world.writes.writing([key(1)])) == 1
    world.emit([SessionLost(STEP[0])])
    assert ended == ["both"] and not world.writes.writing([key(1)])
    assert not world.writes._by_key
    world.writes.when_ended(writes, lambda: ended.append("over"))
    assert ended == ["both", "over"], "what has ended is not waited for"

"""Fetches and writes of the tier: what the arena, the core and the host are told, whatever the host answers."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from layerflow.flow.events import Event, FetchFailed, LayersFetched
from layerflow.hosts.backend import ObjectStatus
from layerflow.keys import KEY_BYTES
from layerflow.objects import HEADER_BYTES
from layerflow.pool.arena import Arena
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.tier.fetches import FetchDependency, Fetches
from layerflow.server.tier.writes import Writes
from layerflow.wire.host_messages import (
    Advance,
    Drop,
    Fetch,
    Fetched,
    Finish,
    ObjectFailure,
    ToHost,
    Unfetch,
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
    """A pool of `room` objects, and a host that only listens."""

    def __init__(self, room: int = 8, backlog: int = 1 << 30) -> None:
        self.pool = MemoryPool(Arena(room * (NBYTES + 4096)))
        self.sent: list[ToHost] = []
        self.events: list[Event] = []
        self.failed: list[tuple[bytes, int]] = []
        self.written: list[bytes] = []
        self.alive = True
        self.fetches = Fetches(self.pool, self.send, self.events.extend, self.fail)
        self.writes = Writes(self.pool, backlog, self.send, lambda one: self.written.append(one.key), self.fail)

    def send(self, message: ToHost) -> bool:
        if self.alive:
            self.sent.append(message)
        return self.alive

    def fail(self, name: bytes, outcome: int, reason: str) -> None:
        self.failed.append((name, outcome))

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def news(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        return events

    def begin(self, *names: int) -> Fetch:
        self.fetches.begin([new(name) for name in names], LAYERS, 1.0, now=0.0)
        return self.said(Fetch)[-1]

    def watch(self, *names: int, number: int = 1, part: int = 0, step: tuple[int, int] = STEP) -> FetchDependency:
        jobs = list({self.fetches.coming(key(name)).job for name in names})
        arrival = FetchDependency(step, number, 0, ("step", *step), jobs, {key(name): [part] for name in names})
        self.fetches.watch(arrival)
        return arrival

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


def test_what_comes_is_in_the_arena_once_whole_and_never_before(world):
    fetch = world.begin(1, 2)
    assert split_keys(fetch.objects.keys) == [key(1), key(2)]
    assert unpack_u64(fetch.objects.layer_bytes) == [1024, 1024] and fetch.timeout_ms == 1000
    assert unpack_u64(fetch.objects.offsets) == [world.fetches.coming(key(name)).offset for name in (1, 2)]
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=False))
    assert world.pool.lookup([key(1), key(2)]) == [False, False]
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    assert world.pool.lookup([key(1), key(2)]) == [True, True]
    assert key(1) not in world.fetches and len(world.fetches) == 0


def test_a_step_hears_of_layers_as_they_come_and_never_twice(world):
    fetch = world.begin(1, 2)
    world.fetches.heard(Fetched(fetch.id, 1, ended=False))
    world.watch(1, 2)
    assert world.news() == [LayersFetched(*STEP, 1, 0, 1)]
    world.fetches.heard(Fetched(fetch.id, 1, ended=False))
    assert world.news() == []
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    assert world.news() == [LayersFetched(*STEP, 1, 0, LAYERS)]
    assert world.pool.statistics().pinned == 2, "pinned for the step from the moment they are whole"


def test_parts_of_several_jobs_advance_with_the_slowest(world):
    one, two = world.begin(1), world.begin(2)
    world.watch(1, 2)
    world.fetches.heard(Fetched(one.id, 3, ended=False))
    assert world.news() == []
    world.fetches.heard(Fetched(two.id, 2, ended=False))
    assert world.news() == [LayersFetched(*STEP, 1, 0, 2)]


def test_one_bad_object_fails_its_part_and_leaves_the_others(world):
    fetch = world.begin(1, 2)
    world.watch(1, number=1, part=0)
    world.watch(2, number=2, part=1)
    world.fetches.heard(Fetched(fetch.id, 1, ended=False, failed=(ObjectFailure(0, ObjectStatus.EXPIRED, "lease"),)))
    assert world.news() == [FetchFailed(*STEP, (0,), "not fetched: lease"), *map(layers(1), (1, 2))]
    assert world.failed == [(key(1), ObjectStatus.EXPIRED)]
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    assert world.pool.lookup([key(1), key(2)]) == [False, True]
    world.fetches.forget_step(STEP)
    assert world.pool.statistics().half_written == 0


def layers(count):
    return lambda number: LayersFetched(*STEP, number, 0, count)


def test_a_fetch_that_ends_early_fails_what_waits_and_gives_its_room_back(world):
    fetch = world.begin(1, 2)
    world.watch(1, 2)
    world.fetches.heard(Fetched(fetch.id, 2, ended=True))
    assert [type(event) for event in world.news()] == [FetchFailed, LayersFetched]
    world.fetches.forget_step(STEP)
    assert world.pool.statistics().half_written == 0 and world.pool.lookup([key(1)]) == [False]


def test_the_death_of_the_host_fails_exactly_what_it_carried(world):
    done = world.begin(1)
    world.fetches.heard(Fetched(done.id, LAYERS, ended=True))
    world.begin(2)
    world.watch(2)
    world.save(3)
    world.writes.stored(STEP, 0, 1, 0.0)
    assert world.fetches.host_lost("signal 9") == 1
    world.writes.host_lost("signal 9")
    [lost] = world.news()
    assert lost == FetchFailed(*STEP, (0,), "not fetched: the host process is gone: signal 9")
    assert world.failed == [(key(3), ObjectStatus.FAILED)], "a dead host is no fault of the object that it was fetching"
    assert world.pool.lookup([key(1)]) == [True]
    world.fetches.forget_step(STEP)
    assert world.pool.statistics().half_written == 1, "the step still saves into the arena"
    assert world.writes.backlog_bytes == 0


def test_leases_hold_what_has_come_until_they_run_out(world):
    fetch = world.begin(1, 2)
    world.fetches.lease([key(1)], "request", 5.0)
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    assert world.pool.statistics().pinned == 1
    assert world.pool.expire(5.0) == 1


def test_a_lease_of_what_is_loaded_is_not_taken_up_again_when_it_has_come(world):
    fetch = world.begin(1, 2)
    world.fetches.lease([key(1), key(2)], "request", 5.0)
    world.watch(1)
    world.fetches.drop_lease("request", [key(1)])
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    world.pool.release(("step", *STEP))
    assert world.pool.statistics().pinned == 1, "only what the request has not loaded"
    assert not world.said(Unfetch)


@pytest.mark.parametrize("how", ["one object", "all of it", "its host"])
def test_room_that_a_step_may_be_reading_is_nobody_elses_until_its_loads_are_done(how):
    world = World()
    fetch = world.begin(1)
    world.watch(1)
    world.fetches.heard(Fetched(fetch.id, 2, ended=False))
    match how:
        case "one object":
            world.fetches.heard(
                Fetched(fetch.id, 2, ended=True, failed=(ObjectFailure(0, ObjectStatus.FAILED, "lost"),))
            )
        case "all of it":
            world.fetches.heard(Fetched(fetch.id, 2, ended=True))
        case "its host":
            world.fetches.host_lost("signal 9")
    assert any(isinstance(event, FetchFailed) for event in world.news())
    assert key(1) not in world.fetches and world.pool.lookup([key(1)]) == [False]
    assert world.pool.statistics().half_written == 1, "the step may be copying the layers that came"
    world.fetches.forget_step(STEP)
    assert world.pool.statistics().half_written == 0
    assert not world.said(Unfetch), "the host has ended it already"


def test_what_nobody_wants_any_more_is_called_back_once(world):
    fetch = world.begin(1)
    world.fetches.lease([key(1)], "request", 5.0)
    world.watch(1)
    world.fetches.drop_lease("request")
    assert not world.said(Unfetch)
    world.fetches.forget_step(STEP)
    world.fetches.forget_step(STEP)
    assert world.said(Unfetch) == [Unfetch(fetch.id)]
    assert world.fetches.coming(key(1)) is None and key(1) not in world.fetches, "a new step must not wait for it"
    world.fetches.heard(
        Fetched(fetch.id, 1, ended=True, failed=(ObjectFailure(0, ObjectStatus.FAILED, "nobody wants it"),))
    )
    assert world.failed == [], "it may be offered again at once"
    assert world.news() == [] and world.pool.statistics().half_written == 0


CALLED_BACK = tuple(ObjectFailure(at, ObjectStatus.FAILED, "nobody wants it any more") for at in range(2))


def called_back(world: World, *names: int) -> Fetch:
    """A fetch that was called back and whose host has not answered."""
    fetch = world.begin(*names)
    world.fetches.lease([key(name) for name in names], "request", 5.0)
    world.fetches.heard(Fetched(fetch.id, 2, ended=False))
    world.fetches.drop_lease("request")
    assert world.said(Unfetch) == [Unfetch(fetch.id)]
    return fetch


def test_what_was_called_back_and_is_wanted_again_is_fetched_anew_into_its_room(world):
    fetch = called_back(world, 1, 2)
    world.fetches.begin([new(1), new(2)], LAYERS, 1.0, 0.5)
    assert world.said(Fetch) == [fetch], "the host is still at it"
    assert key(1) in world.fetches and world.fetches.refused == 0
    world.watch(1, 2)
    world.fetches.heard(Fetched(fetch.id, 3, ended=False))
    assert world.news() == [], "layers that are fetched anew are not there"
    world.fetches.heard(Fetched(fetch.id, 3, ended=True, failed=CALLED_BACK))
    [_, anew] = world.said(Fetch)
    assert anew.id != fetch.id and anew.objects == fetch.objects and anew.timeout_ms == 1000
    assert world.failed == [] and world.news() == []
    world.fetches.heard(Fetched(anew.id, 1, ended=False))
    assert world.news() == [LayersFetched(*STEP, 1, 0, 1)]
    world.fetches.heard(Fetched(anew.id, LAYERS, ended=True))
    assert world.news() == [LayersFetched(*STEP, 1, 0, LAYERS)]
    assert world.pool.lookup([key(1), key(2)]) == [True, True]


def test_what_came_all_the_same_is_not_fetched_anew(world):
    fetch = called_back(world, 1)
    world.fetches.begin([new(1)], LAYERS, 1.0, 0.5)
    world.fetches.heard(Fetched(fetch.id, LAYERS, ended=True))
    assert world.said(Fetch) == [fetch] and world.pool.lookup([key(1)]) == [True]


def test_what_is_missing_is_not_fetched_anew_and_who_waits_is_told(world):
    fetch = called_back(world, 1, 2)
    world.fetches.begin([new(1), new(2)], LAYERS, 1.0, 0.5)
    world.watch(1, 2)
    failed = (ObjectFailure(0, ObjectStatus.MISSING, "it is gone"), CALLED_BACK[1])
    world.fetches.heard(Fetched(fetch.id, 0, ended=True, failed=failed))
    [_, anew] = world.said(Fetch)
    assert split_keys(anew.objects.keys) == [key(2)]
    assert isinstance(world.news()[0], FetchFailed) and world.failed == [(key(1), ObjectStatus.MISSING)]
    assert key(1) not in world.fetches and key(2) in world.fetches
    world.fetches.heard(Fetched(anew.id, LAYERS, ended=True))
    assert world.pool.lookup([key(1), key(2)]) == [False, True]


def test_what_is_wanted_again_and_then_not_is_let_go(world):
    fetch = called_back(world, 1)
    world.fetches.begin([new(1)], LAYERS, 1.0, 0.5)
    world.fetches.lease([key(1)], "another", 5.0)
    world.fetches.drop_lease("another")
    assert len(world.said(Unfetch)) == 1 and key(1) not in world.fetches
    world.fetches.heard(Fetched(fetch.id, 2, ended=True, failed=CALLED_BACK[:1]))
    assert world.said(Fetch) == [fetch] and world.failed == []
    assert world.pool.statistics().half_written == 0 and len(world.fetches) == 0


def test_without_a_host_what_is_wanted_again_fails(world):
    fetch = called_back(world, 1)
    world.fetches.begin([new(1)], LAYERS, 1.0, 0.5)
    world.watch(1)
    world.alive = False
    world.fetches.heard(Fetched(fetch.id, 2, ended=True, failed=CALLED_BACK[:1]))
    assert isinstance(world.news()[0], FetchFailed) and len(world.fetches) == 0
    world.fetches.forget_step(STEP)
    assert world.pool.statistics().half_written == 0


def test_nobody_waits_for_what_has_failed_while_the_rest_is_coming(world):
    fetch = world.begin(1, 2)
    world.fetches.heard(
        Fetched(fetch.id, 1, ended=False, failed=(ObjectFailure(0, ObjectStatus.MISSING, "it is gone"),))
    )
    assert world.fetches.coming(key(1)) is None and world.fetches.coming(key(2)) is not None


def test_what_finds_no_room_stays_where_it_is():
    world = World(room=2)
    world.pool.reserve([new(90)], "somebody")
    world.fetches.begin([new(name) for name in range(4)], LAYERS, 1.0, 0.0)
    coming = [name for name in range(4) if key(name) in world.fetches]
    assert 0 < len(coming) < 4 and world.fetches.refused == 4 - len(coming)


def test_without_a_host_nothing_begins(world):
    world.alive = False
    world.fetches.begin([new(1)], LAYERS, 1.0, 0.0)
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


def test_jobs_that_the_host_sits_on_are_named(world):
    fetch = world.begin(1)
    assert world.fetches.overdue(0.5) is None
    assert world.fetches.overdue(1.5).number == fetch.id
    world.save(2, until=3.0)
    assert world.writes.overdue(2.9) is None and world.writes.overdue(3.1) is not None


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
    world.writes._room = 0
    for step, name in (((7, 1), 1), ((7, 2), 2)):
        world.writes.plan(step, 0, LAYERS, [(new(name), 0)], 9.0, 0.0)
        world.writes.when_ended([key(name)], lambda name=name: ended.append(name))
    assert ended == []
    world.writes.stored((7, 1), 0, 1, 0.0)
    assert ended == [1] and world.writes.shed_objects == 1
    world.writes.forget_step((7, 2))
    assert ended == [1, 2]

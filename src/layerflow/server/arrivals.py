"""The books of objects on their way into the arena: fetched from a tier or a peer, or stored by a step and followed.

What moves when, for whom and until when is the core's (:mod:`layerflow.flow.arrivals`). Here is what the core
does not know: which objects they are, where they have room in the arena, and who leases them once they have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import msgspec

from layerflow.expiring import ExpiringSet
from layerflow.flow.commands import Arrived, Call, LayersStored, ObjectsLost, RoomFreed, TransferDone
from layerflow.flow.events import (
    CallDone,
    Event,
    FetchesRevoked,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    Hop,
    IncomingFailed,
    IncomingLeased,
    Item,
)
from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import EndFetch, Fetch, Fetched, Objects, Pull, ToHost
from layerflow.wire.packing import pack_u32, pack_u64

StepKey = tuple[int, int]
Lease = tuple[Owner, float, frozenset[bytes]]


@dataclass(slots=True, eq=False)
class FetchJob:
    """One fetch.

    :param objects: by position, as the core and the host know them.
    :param layers: the model's layer numbers, as the core knows them.
    :param leases: who has looked these keys up: (owner, until, keys).
    :param left: objects that are neither published nor without room.
    :param done: the host has been told of its end.
    """

    number: int
    objects: list[NewObject]
    layers: tuple[int, ...]
    left: int
    leases: list[Lease] = field(default_factory=list)
    done: bool = False

    @property
    def owner(self) -> Owner:
        """Who reserves its room in the arena."""
        return ("fetch", self.number)


class PendingFetch(NamedTuple):
    """An object that is on its way: its room in the arena, and its place in the fetch that brings it."""

    offset: int
    blocks: int
    job: FetchJob
    position: int


@dataclass(frozen=True, slots=True)
class AtPeer:
    """Where the objects of a fetch lie at a peer.

    :param origin: of the job, see :class:`layerflow.wire.peer_link.Origin`.
    :param positions: of each key among those of the peer's lease.
    :param available: so many leading layers are stored there; -1 = all.
    """

    origin: bytes
    positions: Mapping[bytes, int]
    available: int = -1


class Fetches:
    """All fetches of one host.

    :param send: to the host; False = there is none.
    :param emit: to the core, which answers with the commands that are given here.
    :param failed: told of every object that did not come, with its outcome's number.
    :param numbers: of fetches, ascending: shared with those of the other hop, and with follows.
    :param hop: from the backend, or from peers.
    :param ended: told of the number of every fetch that is over.
    """

    def __init__(
        self,
        pool: Pool,
        send: Callable[[ToHost], bool],
        emit: Callable[[Sequence[Event]], None],
        failed: Callable[[bytes, int, str], None],
        numbers: Iterator[int] | None = None,
        *,
        hop: Hop = Hop.FETCH,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self._pool = pool
        self._send = send
        self._emit = emit
        self._failed = failed
        self._jobs: dict[int, FetchJob] = {}
        self._coming: dict[bytes, PendingFetch] = {}
        self._waiting: list[tuple[set[bytes], Callable[[], None]]] = []
        self._numbers, self._hop, self._ended = numbers or ascending(), hop, ended
        self.fetched_objects = 0
        self.fetched_bytes = 0
        self.refused = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._coming

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def coming_objects(self) -> int:
        """Objects that may still come."""
        return len(self._coming)

    def coming(self, key: bytes) -> PendingFetch | None:
        """Where `key` will be; None = it is not on its way, or will not come."""
        return self._coming.get(key)

    def when_come(self, keys: Iterable[bytes], then: Callable[[], None]) -> None:
        """Call `then` once none of these is on its way any more, whatever became of it; perhaps at once."""
        left = {key for key in keys if key in self._coming}
        if left:
            self._waiting.append((left, then))
        else:
            then()

    def objects_of(self, fetch: int) -> Sequence[NewObject]:
        """By position, of a fetch that is not over."""
        return self._jobs[fetch].objects

    def begin(
        self, objects: Sequence[NewObject], layers: Sequence[int], source: str, at_peer: AtPeer | None = None
    ) -> int:
        """Start bringing objects of one group that are neither in the arena nor on their way.

        What finds no room in the arena stays where it is; :meth:`coming` tells.

        :param layers: the model's layer numbers of the group.
        :param source: the engine they are for.
        :param at_peer: where they lie; None = at the backend.
        :returns: the fetch's number; 0 = none has begun.
        """
        number = next(self._numbers)
        owner: Owner = ("fetch", number)
        room = zip(objects, self._pool.reserve(objects, owner), strict=True)
        placed = [(new, place.offset) for new, place in room if place.outcome is ReserveStatus.RESERVED]
        self.refused += len(objects) - len(placed)
        if not placed:
            return 0
        job = FetchJob(number, [new for new, _ in placed], tuple(layers), len(placed))
        told = describe(placed, len(layers))
        if at_peer is not None:
            positions = pack_u32([at_peer.positions[new.key] for new in job.objects])
            told = msgspec.structs.replace(told, origin=at_peer.origin, positions=positions)
        if not self._send(Fetch(job.number, told)):
            self._pool.revoke([new.key for new in job.objects], owner)
            return 0
        self._jobs[job.number] = job
        for position, (new, offset) in enumerate(placed):
            self._coming[new.key] = PendingFetch(offset, new.blocks, job, position)
        items = tuple(Item((new.nbytes - HEADER_BYTES) // len(layers), new.blocks) for new in job.objects)
        available = -1 if at_peer is None else at_peer.available
        self._emit([FetchOpened(job.number, source, tuple(layers), items, available, self._hop)])
        return number

    def lease(self, keys: Iterable[bytes], owner: Owner, until: float) -> None:
        """Pin these for `owner` once they have come."""
        by_job: dict[FetchJob, set[bytes]] = {}
        for key in keys:
            coming = self._coming.get(key)
            if coming is not None:
                by_job.setdefault(coming.job, set()).add(key)
        for job, wanted in by_job.items():
            job.leases.append((owner, until, frozenset(wanted)))
        self._emit([IncomingLeased(job.number, True) for job in by_job if len(job.leases) == 1])

    def drop_lease(self, owner: Owner, keys: Iterable[bytes] | None = None) -> None:
        """The owner wants these no more, None = nothing any more."""
        gone = None if keys is None else frozenset(keys)
        self._unlease(lambda lease: _without(lease, gone) if lease[0] == owner else lease)

    def drop_leases(self, belongs: Callable[[Owner], bool]) -> None:
        """These owners are gone: they want nothing any more."""
        self._unlease(lambda lease: _without(lease, None) if belongs(lease[0]) else lease)

    def lease_owners(self) -> set[Owner]:
        """Who has leased something that is on its way."""
        return {owner for job in self._jobs.values() for owner, _, _ in job.leases}

    def revoke(self, reason: str, *, unwanted: bool = False) -> int:
        """Nothing that is on its way now is published, whenever the host ends it; how many objects.

        :param unwanted: only what no lease and no living load wants.
        """
        before = len(self._coming)
        self._emit([FetchesRevoked(reason, unwanted)])
        return before - len(self._coming)

    def heard(self, message: Fetched) -> None:
        """The host has ended a call."""
        job = self._jobs.get(message.id)
        if job is None:
            return
        failed = [failure for failure in message.failed if job.objects[failure.position].key in self._coming]
        for failure in failed:
            self._failed(job.objects[failure.position].key, failure.outcome, failure.reason)
        self._emit([CallDone(self._hop, message.call, tuple((failure.position, failure.reason) for failure in failed))])

    def obey(self, command: Call | Arrived | ObjectsLost | RoomFreed | TransferDone) -> None:
        """What the core wants done."""
        match command:
            case Call():
                self._send(
                    Pull(
                        command.transfer,
                        command.call,
                        command.lo,
                        command.hi,
                        command.layer_lo,
                        command.layer_hi,
                    )
                )
            case Arrived():
                self._arrived(self._jobs[command.transfer], command)
            case ObjectsLost():
                self._left([self._jobs[command.transfer].objects[position].key for position in command.objects])
            case RoomFreed():
                job = self._jobs[command.transfer]
                self._pool.revoke([job.objects[position].key for position in command.objects], job.owner)
                self._leave(job, len(command.objects))
            case TransferDone():
                self._send(EndFetch(command.transfer))
                job = self._jobs[command.transfer]
                job.done = True
                self._leave(job, 0)

    def _arrived(self, job: FetchJob, command: Arrived) -> None:
        came = [job.objects[position] for position in command.objects]
        keys = [new.key for new in came]
        self.fetched_objects += len(came)
        self.fetched_bytes += sum(new.nbytes for new in came)
        self._pool.commit(keys, job.owner)
        for owner, until, wanted in job.leases:
            self._pool.hold([key for key in keys if key in wanted], owner, until, lease=True)
        for session, step, objects in command.readers:
            self._pool.hold([job.objects[position].key for position in objects], ("step", session, step), math.inf)
        self._left(keys)
        self._leave(job, len(came))

    def _left(self, keys: Sequence[bytes]) -> None:
        """These are not on their way any more."""
        for key in keys:
            del self._coming[key]
        for left, _ in self._waiting:
            left.difference_update(keys)
        done = [then for left, then in self._waiting if not left]
        self._waiting = [each for each in self._waiting if each[0]]
        for then in done:
            then()

    def _leave(self, job: FetchJob, objects: int) -> None:
        job.left -= objects
        if job.done and not job.left:
            del self._jobs[job.number]
            if self._ended is not None:
                self._ended(job.number)

    def _unlease(self, change: Callable[[Lease], Lease]) -> None:
        dropped: list[Event] = []
        for job in self._jobs.values():
            if job.leases and not job.done:
                job.leases = [left for lease in job.leases if (left := change(lease))[2]]
                if not job.leases:
                    dropped.append(IncomingLeased(job.number, False))
        self._emit(dropped)


def _without(lease: Lease, gone: frozenset[bytes] | None) -> Lease:
    """What is left of a lease once its owner wants these no more; None = nothing any more."""
    by, until, keys = lease
    return by, until, keys - gone if gone is not None else frozenset()


def describe(placed: Sequence[tuple[NewObject, int]], layers: int) -> Objects:
    """Objects of one group, and where their headers are in the arena, as the host is told of them."""
    objects = [new for new, _ in placed]
    return Objects(
        layers,
        b"".join(new.key for new in objects),
        pack_u64([offset for _, offset in placed]),
        pack_u32([new.blocks for new in objects]),
        pack_u64([(new.nbytes - HEADER_BYTES) // layers for new in objects]),
        pack_u32([new.tokens for new in objects]),
        tuple((position, new.parent) for position, new in enumerate(objects) if new.parent),
        tuple((position, new.block_digests) for position, new in enumerate(objects) if new.block_digests),
    )


# The book of objects that loads take while a step stores them, or before one does.
#
# What moves when, and what is given up, is the core's (:mod:`layerflow.flow.arrivals`). Here is what the core
# does not know: which objects they are, where they lie in the arena, and whose their room is.


FollowCommand = Arrived | ObjectsLost | RoomFreed | TransferDone | LayersStored
ALLOWED_S = 600.0
"""How long after its lookup a request's steps may follow what it has hit."""
MOST_ALLOWED = 1 << 18
"""Requests whose steps may follow. Of more, the steps of the oldest find their objects missing and compute them."""


@dataclass(slots=True, eq=False)
class FollowJob:
    """One follow.

    :param keys: by position, as the core knows them.
    :param layers: the model's layer numbers of their group.
    :param promised: no step saves them yet.
    :param lent: keys that other servers read. :param stored: so many leading layers of it are.
    :param held: positions whose room a load may still read although nobody will store them.
    """

    number: int
    keys: list[bytes]
    layers: tuple[int, ...]
    promised: bool
    done: bool = False
    held: set[int] = field(default_factory=set)
    lent: set[bytes] = field(default_factory=set)
    stored: int = 0

    @property
    def owner(self) -> Owner:
        """Whose the room of what was given up is, until no load touches it."""
        return ("follow", self.number)


class PendingFollow(NamedTuple):
    """An object that is followed: its room in the arena, and its place in the follow."""

    offset: int
    blocks: int
    job: FollowJob
    position: int


class LentListener(Protocol):
    """Who lends objects that are being stored. Called on the loop."""

    def lent_stored(self, keys: Sequence[bytes], layers: int) -> None:
        """So many leading layers of these are stored."""

    def lent_whole(self, keys: Sequence[bytes]) -> None:
        """These are complete."""

    def lent_lost(self, keys: Sequence[bytes], reason: str) -> None:
        """These will not be."""


class Follows:
    """All follows of a server.

    :param emit: gives events to the core, which answers with the commands that are given here.
    :param part_of: of an object that a step saves, the position of its save part; None = the step saves it no more.
    :param numbers: of follows, ascending: shared with fetches.
    """

    def __init__(
        self,
        pool: Pool,
        emit: Callable[[Sequence[Event]], None],
        part_of: Callable[[StepKey, bytes], int | None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._pool = pool
        self._emit = emit
        self._part_of = part_of
        self._numbers = numbers or ascending()
        self._jobs: dict[int, FollowJob] = {}
        self._coming: dict[bytes, PendingFollow] = {}
        self._held: dict[bytes, tuple[FollowJob, int]] = {}
        self._allowed: ExpiringSet[tuple[str, str]] = ExpiringSet(MOST_ALLOWED)  #: engine and request
        self.objects = 0
        self.listener: LentListener | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def coming_objects(self) -> int:
        """Objects that may still be stored."""
        return len(self._coming)

    # Whose requests may follow -------------------------------------------------------------------

    def allow(self, engine: str, request: str, now: float) -> None:
        """Let the steps of a request wait for objects that are still to be stored: its lookup has hit some."""
        self._allowed.add((engine, request), now + ALLOWED_S)

    def disallow(self, engine: str, request: str) -> None:
        """Take that back: the request's hit was dropped."""
        self._allowed.discard((engine, request))

    def allowed(self, engine: str, request: str) -> bool:
        """Return whether the request's steps may wait for objects that are not stored."""
        return (engine, request) in self._allowed

    def expire(self, now: float) -> None:
        """Forget requests that looked up long ago."""
        self._allowed.expire(now)

    # Loads ---------------------------------------------------------------------------------------

    def open(self, keys: Iterable[bytes], group: int, layers: Sequence[int]) -> None:
        """Register loads for objects that a step saves or a hand-off keeps room for; others are ignored.

        :meth:`coming` then tells their places.

        :param keys: of one group.
        :param layers: the model's layer numbers of the group.
        """
        saved: dict[StepKey, dict[bytes, int]] = {}
        promised: list[bytes] = []
        for key in keys:
            writer = self._pool.writer(key) if key not in self._held else None
            match writer:
                case ("step", int(session), int(step)):
                    part = self._part_of((session, step), key)
                    if part is not None:
                        saved.setdefault((session, step), {})[key] = part
                case ("handoff", _, _):
                    promised.append(key)
        events: list[Event] = [self._follow(parts, group, layers, step) for step, parts in saved.items()]
        if promised:
            job = self._begin(promised, layers, promised=True)
            events.append(FollowOpened(job.number, job.layers, len(promised)))
        self._emit(events)

    def coming(self, key: bytes) -> PendingFollow | None:
        """An object's place while it may still be stored."""
        return self._coming.get(key)

    # Other servers -------------------------------------------------------------------------------

    def lend(self, keys: Sequence[bytes], group: int, layers: Sequence[int]) -> list[PendingFollow | None]:
        """Follow these for another server, as far as somebody stores them or keeps room, until :meth:`give_back`."""
        self.open([key for key in keys if key not in self._coming], group, layers)
        found = [self._coming.get(key) for key in keys]
        first: dict[FollowJob, None] = {}
        for key, pending in zip(keys, found, strict=True):
            if pending is not None:
                if not pending.job.lent:
                    first[pending.job] = None
                pending.job.lent.add(key)
        self._emit([IncomingLeased(job.number, True) for job in first])
        return found

    def give_back(self, keys: Iterable[bytes]) -> None:
        """No other server reads these any more."""
        gone = set(keys)
        over = []
        for job in self._jobs.values():
            if job.lent & gone:
                job.lent -= gone
                if not job.lent:
                    over.append(IncomingLeased(job.number, False))
        self._emit(over)

    # Saves ---------------------------------------------------------------------------------------

    def adopted(self, step: StepKey, group: int, parts: Mapping[bytes, int]) -> list[Event]:
        """A step saves these objects of one group now: what the core is told once it knows of the step.

        :param parts: of each object, its position in the step's saves.
        """
        by_job: dict[FollowJob, dict[int, bytes]] = {}
        for key in parts:
            pending = self._coming.get(key)
            if pending is not None and pending.job.promised:
                by_job.setdefault(pending.job, {})[pending.position] = key
        events: list[Event] = []
        for job, mine in by_job.items():
            for position in mine:
                job.held.discard(position)
            opened = self._follow({key: parts[key] for key in mine.values()}, group, job.layers, step)
            lent = job.lent & set(mine.values())
            if lent:
                self._jobs[opened.follow].lent, opened = lent, replace(opened, leased=True)
                job.lent -= lent
                if not job.lent:
                    events.append(IncomingLeased(job.number, False))
            events += [opened, FollowMoved(job.number, tuple(mine), opened.follow)]
        return events

    def withdraw(self, keys: Sequence[bytes], owner: Owner, reason: str) -> None:
        """Nobody will store these, for which `owner` has room: it returns once no load touches it."""
        free = [key for key in keys if key not in self._held]
        if free:
            self._pool.revoke(free, owner)
        lost: dict[FollowJob, list[tuple[int, str]]] = {}
        for key in keys:
            if key in self._held:
                job, position = self._held[key]
                self._pool.transfer([key], owner, job.owner)
                if job.promised and key in self._coming:
                    lost.setdefault(job, []).append((position, reason))
        self._emit([IncomingFailed(job.number, tuple(failed)) for job, failed in lost.items()])

    # The core ------------------------------------------------------------------------------------

    def obey(self, command: FollowCommand) -> None:
        """What has become true of a follow."""
        job = self._jobs[command.transfer]
        match command:
            case Arrived():
                for position in command.objects:
                    key = job.keys[position]
                    del self._coming[key]
                    del self._held[key]
                    job.held.discard(position)
                self._tell_whole(job, [job.keys[position] for position in command.objects])
                for session, step, objects in command.readers:
                    self._pool.hold([job.keys[position] for position in objects], ("step", session, step), math.inf)
            case ObjectsLost():
                for position in command.objects:
                    self._coming.pop(job.keys[position], None)
                lost = [key for position in command.objects if (key := job.keys[position]) in job.lent]
                if lost and self.listener is not None:
                    self.listener.lent_lost(lost, command.reason)
            case LayersStored():
                job.stored = command.layers
                lent = [key for key in job.keys if key in job.lent and key in self._coming]
                if lent and self.listener is not None:
                    self.listener.lent_stored(lent, command.layers)
            case RoomFreed():
                for position in command.objects:
                    job.held.discard(position)
                    self._held.pop(job.keys[position], None)
                self._pool.revoke([job.keys[position] for position in command.objects], job.owner)
            case TransferDone():
                job.done = True
        if job.done and not job.held:
            del self._jobs[job.number]

    # ---------------------------------------------------------------------------------------------

    def _tell_whole(self, job: FollowJob, keys: Sequence[bytes]) -> None:
        lent = [key for key in keys if key in job.lent]
        if lent and self.listener is not None:
            self.listener.lent_whole(lent)

    def _follow(self, parts: Mapping[bytes, int], group: int, layers: Sequence[int], step: StepKey) -> FollowOpened:
        job = self._begin(list(parts), layers, promised=False)
        return FollowOpened(job.number, job.layers, len(parts), *step, group, tuple(parts.values()))

    def _begin(self, keys: list[bytes], layers: Sequence[int], *, promised: bool) -> FollowJob:
        job = FollowJob(next(self._numbers), keys, tuple(layers), promised)
        self._jobs[job.number] = job
        self.objects += len(keys)
        for position, key in enumerate(keys):
            room = self._pool.room(key)
            assert room is not None
            self._coming[key] = PendingFollow(room.offset, room.blocks, job, position)
            self._held[key] = job, position
            job.held.add(position)
        return job

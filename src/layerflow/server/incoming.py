"""The book of objects on their way into the arena: fetched from a tier or a peer, or stored by a step and followed.

What moves when, for whom and until when is the core's (:mod:`layerflow.flow.arrivals`). Here is what the core does not
know: which objects they are, where they have room in the arena, whose that is, and who leases them once they have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from layerflow.errors import InvalidTransition
from layerflow.expiring import ExpiringSet
from layerflow.flow.arrivals import check_fetch
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
from layerflow.server.waiters import Waiters
from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import EndFetch, Fetch, Fetched, Objects, Pull, ToHost
from layerflow.wire.packing import pack_u32, pack_u64

StepKey = tuple[int, int]
IncomingCommand = Call | Arrived | ObjectsLost | RoomFreed | LayersStored | TransferDone


@dataclass(slots=True)
class IncomingLease:
    """What somebody wants of a job, to be pinned once it has come.

    :param lent: another server reads it, from the first layer on: it is pinned however much is pinned already.
    """

    until: float
    keys: set[bytes]
    lent: bool


@dataclass(slots=True, eq=False)
class IncomingJob:
    """Objects of one group that are on their way together: one fetch, or one follow.

    :param source: brings them.
    :param keys: by position, as the core and whoever moves them know them.
    :param layers: the model's layer numbers, as the core knows them.
    :param left: positions whose room in the arena is still reserved: neither published nor given back.
    :param done: nothing of it comes any more.
    :param leases: what others than loads want of it, by owner. :param readers: engines whose steps load some of it.
    """

    number: int
    source: IncomingSource
    keys: list[bytes]
    layers: tuple[int, ...]
    left: set[int]
    done: bool = False
    leases: dict[Owner, IncomingLease] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)

    @property
    def owner(self) -> Owner:
        """The owner of the room of what a fetch brings, and of what a follow was to take and nobody stores."""
        return (self.source.name, self.number)


class IncomingObject(NamedTuple):
    """An object that is on its way: its room in the arena, and its place among those that come with it."""

    offset: int
    blocks: int
    job: IncomingJob
    position: int


class IncomingSource:
    """One that brings objects.

    :ivar name: of whoever reserves their room.
    """

    name = ""

    def __init__(self, incoming: IncomingObjects) -> None:
        self._incoming = incoming

    def __len__(self) -> int:
        return sum(job.source is self for job in self._incoming.jobs.values())

    @property
    def coming_objects(self) -> int:
        """Objects that may still come from here."""
        return sum(each.job.source is self for each in self._incoming.coming.values())

    def coming(self, key: bytes) -> IncomingObject | None:
        """Return where an object will be that comes from here; None = it is not on its way, or will not come."""
        coming = self._incoming.coming.get(key)
        return coming if coming is not None and coming.job.source is self else None

    def obey(self, job: IncomingJob, command: IncomingCommand) -> None:
        """Do what the core wants of a job. The book notes it next."""

    def job_over(self, job: IncomingJob) -> None:
        """Forget a job that has left the book."""


class IncomingObjects:
    """All objects that are on their way into the arena of a server.

    :param emit: to the core, which answers with the commands that are given here.
    """

    def __init__(self, pool: Pool, emit: Callable[[Sequence[Event]], None]) -> None:
        self.pool = pool
        self.emit = emit
        self.numbers = ascending()  #: of jobs; the core is told of them in this order
        self.jobs: dict[int, IncomingJob] = {}  #: those that are not over
        self.coming: dict[bytes, IncomingObject] = {}  #: what is on its way, and may still come
        self._leased: dict[Owner, dict[IncomingJob, None]] = {}  # what each owner has leased something of
        self.owner_listener: Callable[[Owner], None] | None = None  #: hears of each owner that has leased nothing more
        #: pins what has come for an owner that has leased it, as far as leases may, until then
        self.pin_leased: Callable[[Sequence[bytes], Owner, float], object] = self._pin_leased
        self._waiters: Waiters[bytes] = Waiters()  # for objects on their way

    def _pin_leased(self, keys: Sequence[bytes], owner: Owner, until: float) -> object:
        return self.pool.hold(keys, owner, until, lease=True)

    def add(self, job: IncomingJob, room: Iterable[tuple[int, int]]) -> None:
        """Begin a job.

        :param room: of each object, its offset in the arena and its blocks.
        """
        self.jobs[job.number] = job
        for position, (key, (offset, blocks)) in enumerate(zip(job.keys, room, strict=True)):
            self.coming[key] = IncomingObject(offset, blocks, job, position)

    def positions(self, number: int) -> list[int]:
        """Return which objects of a job may still come."""
        job = self.jobs[number]
        return [at for at, key in enumerate(job.keys) if (coming := self.coming.get(key)) and coming.job is job]

    def obey(self, command: IncomingCommand) -> None:
        """Do what the core wants, or note what has become true."""
        job = self.jobs[command.transfer]
        job.source.obey(job, command)
        match command:
            case Arrived():
                self._arrived(job, command)
            case ObjectsLost():
                self._leave([job.keys[position] for position in command.objects])
            case RoomFreed():
                job.left.difference_update(command.objects)
                self.pool.revoke([job.keys[position] for position in command.objects], job.owner)
            case TransferDone():
                job.done = True
                if isinstance(job, IncomingFetchJob):  # of a follow, readers may be at the room of what is lost
                    self._end_leases(job, list(job.leases))
        # Waking who waited for its objects may have ended the job already: the core is told once.
        if job.done and not job.left and self.jobs.pop(job.number, None) is not None:
            self._end_leases(job, list(job.leases))
            job.source.job_over(job)

    def _arrived(self, job: IncomingJob, command: Arrived) -> None:
        """Pin what is whole in the arena, for whoever has leased it and for the steps that load it."""
        keys = [job.keys[position] for position in command.objects]
        for owner, lease in job.leases.items():
            wanted = [key for key in keys if key in lease.keys]
            if lease.lent:
                self.pool.hold(wanted, owner, lease.until)
            elif wanted:
                self.pin_leased(wanted, owner, lease.until)
        for session, step, objects in command.readers:
            self.pool.hold([job.keys[position] for position in objects], ("step", session, step), math.inf)
        job.left.difference_update(command.objects)
        self._leave(keys)

    def _leave(self, keys: Sequence[bytes]) -> None:
        """Note that these are not on their way any more."""
        for key in keys:
            self.coming.pop(key, None)
        self._waiters.end(keys)

    def when_come(self, keys: Iterable[bytes], on_done: Callable[[], None]) -> Callable[[], None]:
        """Call `on_done` once none of these is on its way any more, whatever became of it; perhaps at once.

        :returns: see :meth:`.Waiters.wait`.
        """
        return self._waiters.wait([key for key in keys if key in self.coming], on_done)

    def lease(self, keys: Iterable[bytes], owner: Owner, until: float) -> None:
        """Pin for `owner`, once they have come, those of these that are fetched."""
        if not self.coming:
            return
        by_job: dict[IncomingJob, set[bytes]] = {}
        for key in keys:
            coming = self.coming.get(key)
            if coming is not None and isinstance(coming.job, IncomingFetchJob):
                # The job's own key, which is there anyway: of many leases of it each keeps a place in a table alone.
                by_job.setdefault(coming.job, set()).add(coming.job.keys[coming.position])
        self.take_lease(by_job, owner, until)

    def take_lease(
        self, by_job: Mapping[IncomingJob, Iterable[bytes]], owner: Owner, until: float, *, lent: bool = False
    ) -> None:
        """Lease some keys of some jobs; parameters as of :class:`IncomingLease`."""
        first: list[Event] = []
        for job, keys in by_job.items():
            if not job.leases:
                first.append(IncomingLeased(job.number, True))
            self._lease(job, owner, until, keys, lent)
        self.emit(first)

    def _lease(self, job: IncomingJob, owner: Owner, until: float, keys: Iterable[bytes], lent: bool) -> None:
        lease = job.leases.setdefault(owner, IncomingLease(until, set(), lent))
        lease.until = max(lease.until, until)
        lease.keys.update(keys)
        self._leased.setdefault(owner, {})[job] = None

    def _end_leases(self, job: IncomingJob, owners: Iterable[Owner]) -> None:
        for owner in owners:
            del job.leases[owner]
            del self._leased[owner][job]
            if not self._leased[owner]:
                del self._leased[owner]
                if self.owner_listener is not None:
                    self.owner_listener(owner)

    def divide(self, job: IncomingJob, heir: IncomingJob, keys: Collection[bytes]) -> list[Event]:
        """Move some of a job's objects to another job, their leases too.

        :returns: what the core is to be told of the leases.
        """
        return [event for owner in list(job.leases) for event in self._drop(job, owner, keys, heir)]

    def drop_lease(self, owner: Owner, keys: Collection[bytes] | None = None) -> None:
        """The owner wants these no more, None = nothing any more."""
        jobs = self._leased.get(owner)
        if jobs:
            self.emit([event for job in list(jobs) for event in self._drop(job, owner, keys)])

    def drop_leases(self, belongs: Callable[[Owner], bool]) -> None:
        """Drop what owners have leased that are gone."""
        for owner in [owner for owner in self._leased if belongs(owner)]:
            self.drop_lease(owner)

    def transfer_lease(self, owner: Owner, heir: Owner, until: float) -> None:
        """All that `owner` has leased is `heir`'s from now on, until then, or longer where either had it for longer."""
        for job in list(self._leased.get(owner, ())):
            lease = job.leases[owner]
            self._lease(job, heir, max(until, lease.until), lease.keys, lease.lent)
            self._end_leases(job, [owner])

    def leased_by(self, *owners: Owner) -> int:
        """How many objects these owners have leased that are on their way; what several have counts once."""
        leased = 0
        for job in {job: None for owner in owners for job in self._leased.get(owner, ())}:
            keys = [job.leases[owner].keys for owner in owners if owner in job.leases]
            leased += len(keys[0] if len(keys) == 1 else set().union(*keys))
        return leased

    def lease_owners(self) -> set[Owner]:
        """Return everyone who has leased something that is on its way."""
        return set(self._leased)

    def _drop(
        self, job: IncomingJob, owner: Owner, keys: Collection[bytes] | None, heir: IncomingJob | None = None
    ) -> list[Event]:
        """The owner wants these of a job no more, None = nothing of it; or wants them of `heir`."""
        lease = job.leases[owner]
        gone = lease.keys if keys is None else lease.keys.intersection(keys)
        if heir is not None and gone:
            self._lease(heir, owner, lease.until, gone, lease.lent)
        lease.keys = lease.keys - gone
        if lease.keys:
            return []
        self._end_leases(job, [owner])
        return [] if job.leases else [IncomingLeased(job.number, False)]

    def revoke(self, reason: str, *, unwanted: bool = False) -> int:
        """Nothing that is fetched now is published, whenever its host ends it; how many objects.

        :param unwanted: only what no lease and no living load wants.
        """
        before = self._fetched()
        self.emit([FetchesRevoked(reason, unwanted)])
        return before - self._fetched()

    def _fetched(self) -> int:
        return sum(isinstance(each.job, IncomingFetchJob) for each in self.coming.values())


# Fetched by a host.


@dataclass(slots=True, eq=False)
class IncomingFetchJob(IncomingJob):
    """One fetch; its objects by position."""

    objects: list[NewObject] = field(default_factory=list)


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


class IncomingFetches(IncomingSource):
    """What one host fetches.

    :param send: to the host; False = there is none.
    :param failed: told of every object that did not come, with its outcome's number.
    :param hop: from the backend, or from peers.
    :param called: told of every call that the host is given.
    :param ended: told of the number of every fetch that is over.
    """

    name = "fetch"

    def __init__(
        self,
        incoming: IncomingObjects,
        send: Callable[[ToHost], bool],
        failed: Callable[[bytes, int, str], None],
        *,
        hop: Hop = Hop.FETCH,
        called: Callable[[Call], None] | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(incoming)
        self._send = send
        self._failed = failed
        self._hop, self._called, self._ended = hop, called, ended
        self.fetched_objects = 0
        self.fetched_bytes = 0
        self.refused = 0

    def among(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which of these are on their way from this host."""
        known = self._incoming.coming
        if not known:
            return [False] * len(keys)
        return [coming is not None and coming.job.source is self for coming in map(known.get, keys)]

    def begin(
        self, objects: Sequence[NewObject], layers: Sequence[int], engine: str, at_peer: AtPeer | None = None
    ) -> int:
        """Start bringing objects of one group that are neither in the arena nor on their way.

        What finds no room in the arena stays where it is; :meth:`coming` tells.

        :param layers: the model's layer numbers of the group.
        :param engine: for which.
        :param at_peer: where they lie; None = at the backend.
        :returns: the fetch's number; 0 = none has begun.
        :raises InvalidTransition: the core would refuse it; nothing has changed.
        """
        pool, number = self._incoming.pool, next(self._incoming.numbers)
        owner: Owner = (self.name, number)
        room = zip(objects, pool.reserve(objects, owner), strict=True)
        placed = [(new, place.offset) for new, place in room if place.outcome is ReserveStatus.RESERVED]
        self.refused += len(objects) - len(placed)
        if not placed:
            return 0
        mine = [new for new, _ in placed]
        job = IncomingFetchJob(
            number, self, [new.key for new in mine], tuple(layers), set(range(len(mine))), objects=mine
        )
        items = tuple(Item((new.nbytes - HEADER_BYTES) // len(layers), new.blocks) for new in mine)
        available = -1 if at_peer is None else at_peer.available
        opened = FetchOpened(number, engine, job.layers, items, available, self._hop)
        try:
            # The core may be told later, behind what it is being told now: what it would refuse is refused before the
            # host and the book have it, from which only the core takes it back.
            check_fetch(opened)
        except InvalidTransition:
            pool.revoke(job.keys, owner)
            raise
        told = describe(placed, len(layers))
        if at_peer is not None:
            positions = pack_u32([at_peer.positions[key] for key in job.keys])
            told = msgspec.structs.replace(told, origin=at_peer.origin, positions=positions)
        if not self._send(Fetch(number, told)):
            pool.revoke(job.keys, owner)
            return 0
        self._incoming.add(job, [(offset, new.blocks) for new, offset in placed])
        self._incoming.emit([opened])
        return number

    def call_ended(self, message: Fetched) -> None:
        """The host has ended a call."""
        job = self._incoming.jobs.get(message.id)
        if job is None or job.source is not self:
            return
        failed = [failure for failure in message.failed if self.coming(job.keys[failure.position])]
        for failure in failed:
            self._failed(job.keys[failure.position], failure.outcome, failure.reason)
        done = tuple((failure.position, failure.reason) for failure in failed)
        self._incoming.emit([CallDone(self._hop, message.call, done)])

    def obey(self, job: IncomingJob, command: IncomingCommand) -> None:
        """Tell the host; publish what has come."""
        match command:
            case Call():
                if self._called is not None:
                    self._called(command)
                lo, hi, layer_lo, layer_hi = command.lo, command.hi, command.layer_lo, command.layer_hi
                self._send(Pull(command.transfer, command.call, lo, hi, layer_lo, layer_hi))
            case Arrived():
                assert isinstance(job, IncomingFetchJob)
                self.fetched_objects += len(command.objects)
                self.fetched_bytes += sum(job.objects[position].nbytes for position in command.objects)
                self._incoming.pool.commit([job.keys[position] for position in command.objects], job.owner)
            case TransferDone():
                self._send(EndFetch(command.transfer))

    def job_over(self, job: IncomingJob) -> None:
        """Tell that a fetch is over."""
        if self._ended is not None:
            self._ended(job.number)


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


# Stored by a step, and taken by loads meanwhile: what a step saves, or a hand-off keeps room for until one does.


ALLOWED_S = 600.0
"""How long after its lookup a request's steps may follow what it has hit."""
MOST_ALLOWED = 1 << 18
"""Requests whose steps may follow. Of more, the steps of the oldest find their objects missing and compute them."""


@dataclass(slots=True, eq=False)
class IncomingSaveJob(IncomingJob):
    """One follow.

    :param unclaimed: no step saves its objects yet.
    :param stored: so many leading layers are.
    """

    unclaimed: bool = False
    stored: int = 0


class LentListener(Protocol):
    """One that lends objects that are being stored. Called on the loop."""

    def lent_stored(self, owner: Owner, keys: Sequence[bytes], layers: int) -> None:
        """So many leading layers are stored of objects that were lent to `owner`."""

    def lent_whole(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Objects are complete, and are pinned for `owner` before anything else is done."""

    def lent_lost(self, owner: Owner, keys: Sequence[bytes], reason: str) -> None:
        """Objects will not be complete."""


class IncomingSaves(IncomingSource):
    """All follows of a server.

    :param part_of: of an object that a step saves, the position of its save part; None = the step saves it no more.
    :ivar objects: followed since the start.
    """

    name = "follow"
    listener: LentListener  #: set before anything is lent

    def __init__(self, incoming: IncomingObjects, part_of: Callable[[StepKey, bytes], int | None]) -> None:
        super().__init__(incoming)
        self._part_of = part_of
        # By key, what loads may read although perhaps nobody will store it: its follow, and its position there.
        self._held: dict[bytes, tuple[IncomingSaveJob, int]] = {}
        self._allowed: ExpiringSet[tuple[str, str]] = ExpiringSet(MOST_ALLOWED)  #: engine and request
        self.objects = 0

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
        unclaimed: list[bytes] = []
        for key in keys:
            writer = self._incoming.pool.writer(key) if key not in self._held else None
            match writer:
                case ("step", int(session), int(step)):
                    part = self._part_of((session, step), key)
                    if part is not None:
                        saved.setdefault((session, step), {})[key] = part
                case ("handoff", _, _):
                    unclaimed.append(key)
        events = [_opened(self._begin(parts, layers), parts, group, step) for step, parts in saved.items()]
        if unclaimed:
            job = self._begin(unclaimed, layers, unclaimed=True)
            events.append(FollowOpened(job.number, job.layers, len(unclaimed)))
        self._incoming.emit(events)

    def awaited_by(self, engine: str, key: bytes) -> bool:
        """Return whether a step of this engine has loaded an object from where it is still to be stored, or is to."""
        held = self._held.get(key)
        return held is not None and engine in held[0].readers

    def given_up(self, key: bytes) -> bool:
        """Return whether nobody stores an object whose room loads may still read: it cannot be loaded, nor saved."""
        return key in self._held and key not in self._incoming.coming

    # Other servers -------------------------------------------------------------------------------

    def lend(
        self, keys: Sequence[bytes], group: int, layers: Sequence[int], owner: Owner
    ) -> list[tuple[IncomingObject, IncomingSaveJob] | None]:
        """Follow these for a reader at another server, as far as somebody stores them or keeps room.

        :param owner: has them leased until :meth:`stop_lending`.
        """
        self.open([key for key in keys if key not in self._incoming.coming], group, layers)
        found = [(coming, self._held[key][0]) if (coming := self.coming(key)) else None for key in keys]
        by_job: dict[IncomingJob, list[bytes]] = {}
        for key, followed in zip(keys, found, strict=True):
            if followed is not None:
                by_job.setdefault(followed[1], []).append(key)
        self._incoming.take_lease(by_job, owner, math.inf, lent=True)
        return found

    def stop_lending(self, owner: Owner) -> None:
        """Nothing that this owner was lent is read any more."""
        self._incoming.drop_lease(owner)

    # Saves ---------------------------------------------------------------------------------------

    def reservations_taken(self, step: StepKey, group: int, parts: Mapping[bytes, int]) -> list[Event]:
        """A step saves these objects of one group now: what the core is told once it knows of the step.

        :param parts: of each object, its position in the step's saves.
        """
        if not self._held:
            return []
        by_job: dict[IncomingSaveJob, dict[int, bytes]] = {}
        for key in parts:
            if self.coming(key) is not None:
                job, position = self._held[key]
                if job.unclaimed:
                    by_job.setdefault(job, {})[position] = key
        events: list[Event] = []
        for job, mine in by_job.items():
            job.left.difference_update(mine)
            saved = {key: parts[key] for key in mine.values()}
            heir = self._begin(saved, job.layers)
            heir.readers |= job.readers
            events += self._incoming.divide(job, heir, saved)
            opened = _opened(heir, saved, group, step, leased=bool(heir.leases))
            events += [opened, FollowMoved(job.number, tuple(mine), heir.number)]
        return events

    def revoke_reservations(self, keys: Sequence[bytes], owner: Owner, reason: str) -> None:
        """Take back the room of objects that nobody will store: it returns once no load touches it."""
        pool = self._incoming.pool
        free = [key for key in keys if key not in self._held]
        if free:
            pool.revoke(free, owner)
        lost: dict[IncomingSaveJob, list[tuple[int, str]]] = {}
        for key in keys:
            if key in self._held:
                job, position = self._held[key]
                pool.transfer_reservations([key], owner, job.owner)
                if job.unclaimed and key in self._incoming.coming:
                    lost.setdefault(job, []).append((position, reason))
        self._incoming.emit([IncomingFailed(job.number, tuple(failed)) for job, failed in lost.items()])

    # The core ------------------------------------------------------------------------------------

    def obey(self, job: IncomingJob, command: IncomingCommand) -> None:
        """Tell who lends its objects what becomes of them."""
        assert isinstance(job, IncomingSaveJob)
        match command:
            case Arrived():
                keys = [job.keys[position] for position in command.objects]
                for key in keys:
                    del self._held[key]
                for owner, mine in self._lent_of(job, keys):
                    self.listener.lent_whole(owner, mine)
            case ObjectsLost():
                for owner, mine in self._lent_of(job, [job.keys[position] for position in command.objects]):
                    self.listener.lent_lost(owner, mine, command.reason)
            case LayersStored():
                job.stored = command.layers
                for owner, mine in self._lent_of(job, [key for key in job.keys if key in self._incoming.coming]):
                    self.listener.lent_stored(owner, mine, command.layers)
            case RoomFreed():
                for position in command.objects:
                    self._held.pop(job.keys[position], None)

    # ---------------------------------------------------------------------------------------------

    def _lent_of(self, job: IncomingSaveJob, keys: Sequence[bytes]) -> Iterator[tuple[Owner, list[bytes]]]:
        """Yield whom a job is lent to, and those of these keys that it was lent."""
        for owner, lease in list(job.leases.items()):
            if mine := [key for key in keys if key in lease.keys]:
                yield owner, mine

    def _begin(self, keys: Iterable[bytes], layers: Sequence[int], *, unclaimed: bool = False) -> IncomingSaveJob:
        mine = list(keys)
        number = next(self._incoming.numbers)
        job = IncomingSaveJob(number, self, mine, tuple(layers), set(range(len(mine))), unclaimed=unclaimed)
        self.objects += len(mine)
        room = [self._incoming.pool.room(key) for key in mine]
        self._incoming.add(job, [(place.offset, place.blocks) for place in room if place is not None])
        self._held.update((key, (job, position)) for position, key in enumerate(mine))
        return job


def _opened(
    job: IncomingSaveJob, parts: Mapping[bytes, int], group: int, step: StepKey, *, leased: bool = False
) -> FollowOpened:
    """What the core is told of a follow of what a step saves."""
    return FollowOpened(job.number, job.layers, len(parts), *step, group, tuple(parts.values()), leased=leased)

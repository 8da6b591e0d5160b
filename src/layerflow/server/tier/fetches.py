"""Objects on their way from the tier into the arena, and who waits for them.

A fetch is a job of the host: objects of one group, first layer first. Its objects have room in the arena
from the start, so that steps can read the layers that have come while the rest is on its way; they are
published in the arena once whole. What nobody wants any more is called back; wanted again before the host has
answered, it is fetched anew, into the same room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layerflow.flow.events import Event, FetchFailed, LayersFetched
from layerflow.hosts.backend import ObjectStatus as Unreadable
from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.wire.host_messages import Fetch, Fetched, Objects, ToHost, Unfetch, pack_u32, pack_u64

StepKey = tuple[int, int]
Lease = tuple[Owner, float, frozenset[bytes]]


@dataclass(slots=True, eq=False)
class Job:
    """One fetch.

    :param owner: who reserves its room in the arena.
    :param objects: by position, as told to the host.
    :param arrived: so many leading layers of all that has not failed are in the arena.
    :param due: when the host must have ended it.
    :param leases: who has looked these keys up: (owner, until, keys).
    :param lost: what did not come, and keeps its room because steps may still be reading it.
    :param unwanted: it was called back.
    :param again: it was, and is wanted since.
    """

    number: int
    owner: Owner
    objects: list[NewObject]
    layers: int
    due: float
    timeout_s: float
    arrived: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    arrivals: list[FetchDependency] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    unwanted: bool = False
    again: bool = False


@dataclass(slots=True, eq=False)
class FetchDependency:
    """What one step waits for, of one group: load parts, by the keys that they need.

    :param number: the step's name for it in the core.
    :param owner: who pins what has come whole, for as long as the step loads.
    """

    step: StepKey
    number: int
    group: int
    owner: Owner
    jobs: list[Job]
    parts: dict[bytes, list[int]]
    told: int = 0


class PendingFetch(NamedTuple):
    """An object that is on its way: its room in the arena, and the job that brings it."""

    offset: int
    blocks: int
    job: Job


class Fetches:
    """All fetches of one host.

    :param send: to the host; False = there is none.
    :param emit: to the core.
    :param failed: told of every object that did not come, with its outcome's number.
    """

    def __init__(
        self,
        pool: Pool,
        send: Callable[[ToHost], bool],
        emit: Callable[[Sequence[Event]], None],
        failed: Callable[[bytes, int, str], None],
    ) -> None:
        self._pool = pool
        self._send = send
        self._emit = emit
        self._failed = failed
        self._jobs: dict[int, Job] = {}
        self._coming: dict[bytes, PendingFetch] = {}
        self._arrivals: dict[StepKey, list[FetchDependency]] = {}
        self._numbers = 0
        self.fetched_objects = 0
        self.fetched_bytes = 0
        self.refused = 0

    def __contains__(self, key: bytes) -> bool:
        return self.coming(key) is not None

    def __len__(self) -> int:
        return len(self._jobs)

    def coming(self, key: bytes) -> PendingFetch | None:
        """Where `key` will be; None = it is not on its way, will not come, or was called back."""
        coming = self._coming.get(key)
        return None if coming is None or coming.job.unwanted else coming

    def begin(self, objects: Sequence[NewObject], layers: int, timeout_s: float, now: float) -> None:
        """Start bringing objects of one group that are neither in the arena nor on their way.

        What finds no room in the arena stays where it is; :meth:`coming` tells.
        """
        for job in {coming.job for new in objects if (coming := self._coming.get(new.key))}:
            job.unwanted, job.again, job.arrived = False, True, 0
            job.due, job.timeout_s = now + timeout_s, timeout_s
        objects = [new for new in objects if new.key not in self._coming]
        if not objects:
            return
        self._numbers += 1
        owner: Owner = ("fetch", self._numbers)
        room = zip(objects, self._pool.reserve(objects, owner), strict=True)
        placed = [(new, place.offset) for new, place in room if place.outcome is ReserveStatus.RESERVED]
        self.refused += len(objects) - len(placed)
        if not placed:
            return
        job = Job(self._numbers, owner, [new for new, _ in placed], layers, now + timeout_s, timeout_s)
        if not self._order(job, placed):
            self._pool.revoke([new.key for new in job.objects], owner)
            return
        self._jobs[job.number] = job
        for new, offset in placed:
            self._coming[new.key] = PendingFetch(offset, new.blocks, job)

    def lease(self, keys: Iterable[bytes], owner: Owner, until: float) -> None:
        """Pin these for `owner` once they have come."""
        by_job: dict[Job, set[bytes]] = {}
        for key in keys:
            coming = self.coming(key)
            if coming is not None:
                by_job.setdefault(coming.job, set()).add(key)
        for job, wanted in by_job.items():
            job.leases.append((owner, until, frozenset(wanted)))

    def drop_lease(self, owner: Owner, keys: Iterable[bytes] | None = None) -> None:
        """The owner wants these no more, None = nothing any more."""
        gone = None if keys is None else frozenset(keys)
        for job in list(self._jobs.values()):
            if job.leases:
                job.leases = [left for lease in job.leases if (left := _without(lease, owner, gone))[2]]
                self._unwanted(job)

    def watch(self, arrival: FetchDependency) -> None:
        """A step waits: tell the core of it from now on. The core knows the step already."""
        self._arrivals.setdefault(arrival.step, []).append(arrival)
        for job in arrival.jobs:
            job.arrivals.append(arrival)
        self._emit(list(self._progress([arrival])))

    def forget_step(self, step: StepKey) -> None:
        """The step loads nothing any more."""
        for arrival in self._arrivals.pop(step, ()):
            for job in arrival.jobs:
                if arrival in job.arrivals:
                    job.arrivals.remove(arrival)
                    self._unwanted(job)
                if not job.arrivals:
                    self._vacate(job)

    def heard(self, message: Fetched) -> None:
        """News of a job."""
        job = self._jobs.get(message.id)
        if job is None or (job.again and not message.ended):
            return
        anew, job.again = job.again and (bool(message.failed) or message.layers < job.layers), False
        fresh = {
            failure.position: failure
            for failure in message.failed
            if failure.position not in job.failed and not (anew and failure.outcome == Unreadable.FAILED)
        }
        for position, failure in fresh.items():
            job.failed[position] = failure.reason
            if not job.unwanted or failure.outcome != Unreadable.FAILED:  # what was called back has not failed
                self._failed(job.objects[position].key, failure.outcome, failure.reason)
        events = list(self._losses(job, fresh))
        for position in fresh:  # nobody is to wait for these from now on
            self._coming.pop(job.objects[position].key, None)
        if anew:
            self._emit([*events, *self._fetch_anew(job)])
            return
        # The last layer is told with the end: until then any object may still turn out to be broken.
        job.arrived = max(job.arrived, min(message.layers, job.layers if message.ended else job.layers - 1))
        if message.ended:
            events += self._end(job, job.arrived == job.layers, "the fetch was given up")
        else:
            events += self._progress(job.arrivals)
        self._emit(events)

    def host_lost(self, why: str) -> int:
        """The host is dead: nothing writes to the arena for these jobs any more.

        :returns: objects that were wanted and did not come.
        """
        events: list[Event] = []
        lost = 0
        for job in list(self._jobs.values()):
            lost += 0 if job.unwanted else len(job.objects) - len(job.failed)
            events += self._end(job, False, f"the host process is gone: {why}")
        self._emit(events)
        return lost

    def lease_owners(self) -> set[Owner]:
        """Who has leased something that is on its way."""
        return {owner for job in self._jobs.values() for owner, _, _ in job.leases}

    def revoke(self, reason: str) -> int:
        """Nothing that is on its way now is published, whenever the host ends it; how many objects.

        Steps that wait for it are told that it has failed. It can be fetched again once the host has ended this.
        """
        events: list[Event] = []
        revoked = 0
        for job in self._jobs.values():
            coming = [position for position in range(len(job.objects)) if position not in job.failed]
            job.failed.update(dict.fromkeys(coming, reason))
            events += self._losses(job, coming)
            for position in coming:
                self._coming.pop(job.objects[position].key, None)
            if not job.unwanted and not job.again:
                self._send(Unfetch(job.number))
            job.unwanted, job.again, job.leases = True, False, []
            revoked += len(coming)
        self._emit(events)
        return revoked

    def overdue(self, now: float) -> Job | None:
        """A job that the host should have ended by now."""
        return next((job for job in self._jobs.values() if now > job.due), None)

    def _unwanted(self, job: Job) -> None:
        if not (job.leases or job.arrivals or job.unwanted) and job.number in self._jobs:
            job.unwanted = True
            if not job.again:
                self._send(Unfetch(job.number))
            job.again = False

    def _order(self, job: Job, placed: Sequence[tuple[NewObject, int]]) -> bool:
        timeout_ms = max(1, round(job.timeout_s * 1e3))
        return self._send(Fetch(job.number, describe(placed, job.layers), timeout_ms))

    def _fetch_anew(self, job: Job) -> list[Event]:
        """The host has ended what was called back, and it is wanted again: all of it that could be had."""
        self._pool.revoke([job.objects[position].key for position in job.failed], job.owner)
        job.objects = [new for position, new in enumerate(job.objects) if position not in job.failed]
        job.failed = {}
        del self._jobs[job.number]
        self._numbers += 1
        job.number = self._numbers
        self._jobs[job.number] = job
        placed = [(new, self._coming[new.key].offset) for new in job.objects]
        if placed and self._order(job, placed):
            return []
        return self._end(job, False, "the fetch was given up")

    def _losses(self, job: Job, positions: Iterable[int]) -> Iterable[Event]:
        lost = list(positions)
        for arrival in job.arrivals:
            parts: dict[int, str] = {}
            for position in lost:
                hurt = arrival.parts.pop(job.objects[position].key, ())
                parts.update(dict.fromkeys(hurt, job.failed[position]))
            if parts:
                reason = next(iter(parts.values()))
                yield FetchFailed(*arrival.step, tuple(sorted(parts)), f"not fetched: {reason}")

    def _progress(self, arrivals: Iterable[FetchDependency]) -> Iterable[Event]:
        for arrival in arrivals:
            layers = min(job.arrived for job in arrival.jobs)
            if layers > arrival.told:
                arrival.told = layers
                yield LayersFetched(*arrival.step, arrival.number, arrival.group, layers)

    def _end(self, job: Job, complete: bool, reason: str) -> list[Event]:
        """Publish what has come, give back the room of the rest.

        A step that waits has been granted the layers that came first, and may be copying them whatever became of the
        others: until its loads are done nobody else gets that room.
        """
        del self._jobs[job.number]
        came: list[bytes] = []
        lost: list[int] = []
        for position, new in enumerate(job.objects):
            self._coming.pop(new.key, None)
            if complete and position not in job.failed:
                came.append(new.key)
                self.fetched_objects += 1
                self.fetched_bytes += new.nbytes
            else:
                lost.append(position)
        self._pool.commit(came, job.owner)
        job.lost = [job.objects[position].key for position in lost]
        if not job.arrivals:
            self._vacate(job)
        for owner, until, keys in job.leases:
            self._pool.hold([key for key in came if key in keys], owner, until)
        for arrival in job.arrivals:
            self._pool.hold([key for key in came if key in arrival.parts], arrival.owner, math.inf)
        unknown = [position for position in lost if position not in job.failed]
        job.failed.update(dict.fromkeys(unknown, reason))
        events = [*self._losses(job, unknown), *self._progress(job.arrivals)]
        return events

    def _vacate(self, job: Job) -> None:
        """Nobody reads what has not come: its room may be used again."""
        lost, job.lost = job.lost, []
        self._pool.revoke(lost, job.owner)


def _without(lease: Lease, owner: Owner, gone: frozenset[bytes] | None) -> Lease:
    """What is left of a lease once its owner wants these no more; None = nothing any more."""
    by, until, keys = lease
    if by != owner:
        return lease
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
    )

"""Objects on their way from the arena into the tier, layer by layer behind the steps that save them.

A write is a job of the host: what one step saves of one group. It begins with the step, so that the host has asked
the pool for room when the first layer is stored in the arena, and is finished once the step has committed there; what
was revoked is dropped. Where the backlog is full then, the first layer decides. From its commit until the host has
written it, an object is pinned in the arena.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from layerflow.hosts.backend import ObjectStatus
from layerflow.pool.base import NewObject, Owner, Pool
from layerflow.server.tier.fetches import StepKey, describe
from layerflow.wire.host_messages import Advance, Drop, Finish, ToHost, Write, Written, pack_u32


@dataclass(slots=True, eq=False)
class Job:
    """One write.

    :param placed: objects and where their headers are in the arena; by position, as the host knows them.
    :param positions: of the keys that are not dropped.
    :param due: when the host gives it up.
    :param sent: the host knows of it.
    :param finished: the step has committed; what happens now is the host's.
    """

    number: int
    step: StepKey
    group: int
    layers: int
    placed: list[tuple[NewObject, int]]
    positions: dict[bytes, int]
    nbytes: int
    due: float
    stored: int = 0
    sent: bool = False
    finished: bool = False
    dropped: set[int] = field(default_factory=set)

    @property
    def owner(self) -> Owner:
        """Who pins its objects in the arena."""
        return ("write", self.number)


class Writes:
    """All writes to one host.

    :param room: bytes that may be on their way; a job that would take the backlog past it is shed.
    :param send: to the host; False = there is none.
    :param written: told of every object that is in the tier now.
    :param failed: told of every other one: its key, the outcome's number and what happened.
    :param caps: blocks and bytes that one call may write.
    """

    def __init__(
        self,
        pool: Pool,
        room: int,
        send: Callable[[ToHost], bool],
        written: Callable[[NewObject], None],
        failed: Callable[[bytes, int, str], None],
        caps: Callable[[], tuple[int, int]] = lambda: (4096, 64 << 20),
    ) -> None:
        self._caps = caps
        self._pool = pool
        self.room = room
        self._send = send
        self._written = written
        self._failed = failed
        self._jobs: dict[int, Job] = {}
        self._by_step: dict[StepKey, list[Job]] = {}
        self._numbers = 0
        self._ended: anyio.Event | None = None
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []  # for these jobs, by number
        self.backlog_bytes = 0
        self.written_objects = 0
        self.written_bytes = 0
        self.shed_objects = 0
        self.written_at = 0.0

    def __len__(self) -> int:
        return sum(job.sent for job in self._jobs.values())

    def plan(
        self, step: StepKey, group: int, layers: int, placed: Sequence[tuple[NewObject, int]], until: float, now: float
    ) -> None:
        """A step is about to save these objects of one group, at these places of the arena.

        :param until: when the host must be done with them.
        """
        if not placed:
            return
        self._numbers += 1
        positions = {new.key: position for position, (new, _) in enumerate(placed)}
        nbytes = sum(new.nbytes for new, _ in placed)
        job = Job(self._numbers, step, group, layers, list(placed), positions, nbytes, until)
        self._jobs[job.number] = job
        self._by_step.setdefault(step, []).append(job)
        if self._fits(job):
            self._begin(job, now)

    def planned(self, step: StepKey) -> bool:
        """Whether the step has anything to write."""
        return step in self._by_step

    def stored(self, step: StepKey, group: int, layers: int, now: float) -> None:
        """So many leading layers of the step's saves of a group are in the arena."""
        for job in list(self._by_step.get(step, ())):
            if job.group != group or layers <= job.stored:
                continue
            job.stored = layers
            if job.sent:
                self._send(Advance(job.number, layers))
            elif self._fits(job):
                self._begin(job, now)
            else:
                self._shed(job)

    def committed(self, step: StepKey, keys: Iterable[bytes]) -> None:
        """These objects are whole in the arena. What else a job of theirs had will never be."""
        published = set(keys)
        for job in list(self._by_step.get(step, ())):
            mine = [key for key in job.positions if key in published]
            if not mine or not job.sent:
                continue
            self._drop(job, [key for key in job.positions if key not in published])
            job.finished = True
            self._pool.hold(mine, job.owner, math.inf)
            self._by_step[step].remove(job)
            self._send(Finish(job.number))

    def revoked(self, step: StepKey, keys: Iterable[bytes]) -> None:
        """These objects will never be whole."""
        gone = set(keys)
        for job in list(self._by_step.get(step, ())):
            self._drop(job, [key for key in job.positions if key in gone])

    def forget_step(self, step: StepKey) -> None:
        """The step is over: what has not begun by now never will."""
        for job in self._by_step.pop(step, ()):
            if job.sent:
                self._drop(job, list(job.positions))
            else:
                self._forget(job)

    def revoke(self) -> int:
        """Nothing that the host has not written yet is written any more, as far as it hears of this in time.

        :returns: objects.
        """
        jobs = list(self._jobs.values())
        dropped = sum(len(job.positions) for job in jobs)
        for job in jobs:
            self._drop(job, list(job.positions))
        return dropped

    async def ended(self) -> None:
        """Until the host has ended what it has been given by now."""
        under_way = {number for number, job in self._jobs.items() if job.sent}
        while under_way & self._jobs.keys():
            self._ended = self._ended if self._ended is not None and not self._ended.is_set() else anyio.Event()
            await self._ended.wait()

    def heard(self, message: Written) -> None:
        """A job has ended."""
        job = self._jobs.get(message.id)
        if job is None:
            return
        failed = {failure.position: failure for failure in message.failed}
        for key, position in job.positions.items():
            failure = failed.get(position)
            if job.finished and failure is None:
                self.written_objects += 1
                self.written_bytes += job.placed[position][0].nbytes
                self.written_at = time.monotonic()
                self._written(job.placed[position][0])
            elif failure is not None and position not in job.dropped:
                self._failed(key, failure.outcome, failure.reason)
        self._end(job)

    def host_lost(self, why: str) -> None:
        """The host is dead: nothing reads the arena for these jobs any more."""
        for job in list(self._jobs.values()):
            if job.sent:
                for key in job.positions:
                    self._failed(key, ObjectStatus.FAILED, f"the host process is gone: {why}")
                self._end(job)

    def when_ended(self, keys: Iterable[bytes], then: Callable[[], None]) -> None:
        """Call `then` once none of these is on its way any more, whatever became of it; perhaps at once."""
        wanted = set(keys)
        jobs = {job.number for job in self._jobs.values() if not wanted.isdisjoint(job.positions)}
        if jobs:
            self._waiting.append((jobs, then))
        else:
            then()

    async def idle(self) -> None:
        """Until the host has written everything it was given."""
        while len(self):
            self._ended = self._ended if self._ended is not None and not self._ended.is_set() else anyio.Event()
            await self._ended.wait()

    def _fits(self, job: Job) -> bool:
        return self.backlog_bytes + job.nbytes <= self.room

    def _begin(self, job: Job, now: float) -> None:
        """The host is told of what is left of it."""
        job.placed = [job.placed[position] for position in sorted(job.positions.values())]
        job.positions = {new.key: position for position, (new, _) in enumerate(job.placed)}
        timeout_ms = max(1, round((job.due - now) * 1e3))
        if not self._send(Write(job.number, describe(job.placed, job.layers), job.stored, timeout_ms, *self._caps())):
            self._shed(job)
            return
        job.sent = True
        self.backlog_bytes += job.nbytes

    def _shed(self, job: Job) -> None:
        self.shed_objects += len(job.positions)
        self._forget(job)

    def _drop(self, job: Job, keys: list[bytes]) -> None:
        if not keys:
            return
        positions = [job.positions.pop(key) for key in keys]
        if job.sent:
            job.dropped.update(positions)
            self._send(Drop(job.number, pack_u32(positions)))
            return
        job.nbytes -= sum(job.placed[position][0].nbytes for position in positions)
        if not job.positions:
            self._forget(job)

    def _end(self, job: Job) -> None:
        self.backlog_bytes -= job.nbytes
        if job.finished:
            self._pool.release(job.owner)
        self._forget(job)
        if self._ended is not None:
            self._ended.set()

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.number, None)
        mine = self._by_step.get(job.step)
        if mine is not None and job in mine:
            mine.remove(job)
            if not mine:
                del self._by_step[job.step]
        for waiting in list(self._waiting):
            waiting[0].discard(job.number)
            if not waiting[0]:
                self._waiting.remove(waiting)
                waiting[1]()

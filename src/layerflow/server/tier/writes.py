"""The book of objects on their way from the arena to the tier.

What moves when, and what is given up, is the core's (:mod:`layerflow.flow.writes`). Here is what the core does
not know: which objects they are, where they lie in the arena, and their pins there from the commit until the host is
done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio

from layerflow.flow.commands import Call, ObjectsLost, ObjectsPublished, TransferDone, WriteBegun
from layerflow.flow.events import CallDone, Event, Hop, Item, WriteOpened, WritesRevoked
from layerflow.flow.writes import SHED
from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject, Owner, Pool
from layerflow.server.incoming import StepKey, describe
from layerflow.server.waiters import Waiters
from layerflow.system.numbers import ascending
from layerflow.wire import host_messages as wire
from layerflow.wire.packing import pack_u32

WriteCommand = WriteBegun | Call | ObjectsPublished | ObjectsLost | TransferDone


@dataclass(slots=True, eq=False)
class WriteJob:
    """One write.

    :param placed: objects and where their headers are in the arena; by position, as the core and the host know them.
    :param positions: of the keys that are neither lost nor written.
    :param begun: the host knows of it.
    """

    number: int
    step: StepKey
    layers: int
    placed: list[tuple[NewObject, int]]
    positions: dict[bytes, int]
    begun: bool = False

    @property
    def owner(self) -> Owner:
        """The owner of its objects' pins in the arena."""
        return ("write", self.number)

    @property
    def nbytes(self) -> int:
        """Bytes of all its objects."""
        return sum(new.nbytes for new, _ in self.placed)


class Writes:
    """All writes to one host.

    :param send: to the host; False = there is none.
    :param emit: to the core, which answers with the commands that are given here.
    :param written: told of every object that is in the tier now.
    :param failed: told of every one that the host refused: its key, the outcome's number and what happened.
    """

    def __init__(
        self,
        pool: Pool,
        send: Callable[[wire.ToHost], bool],
        emit: Callable[[Sequence[Event]], None],
        written: Callable[[NewObject], None],
        failed: Callable[[bytes, int, str], None],
    ) -> None:
        self._pool = pool
        self._send = send
        self._emit = emit
        self._written = written
        self._failed = failed
        self._jobs: dict[int, WriteJob] = {}
        self._by_step: dict[StepKey, list[WriteJob]] = {}
        self._by_key: dict[bytes, tuple[int, ...]] = {}  # jobs, of what is neither lost nor written: nearly always one
        self._numbers = ascending()
        self._ended = anyio.Event()
        self._waiters: Waiters[int] = Waiters()  # for jobs, by number
        self.written_objects = 0
        self.written_bytes = 0
        self.shed_objects = 0
        self.written_at = 0.0

    def __len__(self) -> int:
        return sum(job.begun for job in self._jobs.values())

    @property
    def backlog_bytes(self) -> int:
        """Bytes of all objects of the writes that the host knows of."""
        return sum(job.nbytes for job in self._jobs.values() if job.begun)

    @property
    def pending_objects(self) -> int:
        """Objects that the host knows of and has not written."""
        return sum(len(job.positions) for job in self._jobs.values() if job.begun)

    def plan(
        self,
        step: StepKey,
        source: str,
        group: int,
        *,
        layers: int,
        placed: Sequence[tuple[NewObject, int]],
        parts: Sequence[int],
    ) -> WriteOpened:
        """A step is about to save these objects of one group, at these places of the arena.

        :param source: the engine that saves them.
        :param parts: of each object, its position in the step's saves.
        :returns: what the core is to be told, once it knows of the step.
        """
        positions = {new.key: position for position, (new, _) in enumerate(placed)}
        job = WriteJob(next(self._numbers), step, layers, list(placed), positions)
        self._jobs[job.number] = job
        self._by_step.setdefault(step, []).append(job)
        alone = (job.number,)
        for key in positions:
            before = self._by_key.get(key)
            self._by_key[key] = alone if before is None else before + alone
        items = tuple(Item((new.nbytes - HEADER_BYTES) // layers, new.blocks) for new, _ in placed)
        return WriteOpened(job.number, source, *step, group, items, tuple(parts))

    def committed(self, step: StepKey, keys: Sequence[bytes]) -> None:
        """Note that these are whole in the arena: they stay until they are written."""
        for job in self._by_step.get(step, ()):
            self._pool.hold([key for key in keys if key in job.positions], job.owner, math.inf)

    def revoke(self, reason: str) -> int:
        """Nothing that the host has not written yet is written any more, as far as it hears of this in time.

        :returns: objects.
        """
        given_up = sum(len(job.positions) for job in self._jobs.values())
        self._emit([WritesRevoked(reason)])
        return given_up

    async def ended(self) -> None:
        """Until the host has ended what it has been given by now."""
        under_way = {number for number, job in self._jobs.items() if job.begun}
        while under_way & self._jobs.keys():
            await self._ended.wait()

    async def idle(self) -> None:
        """Until the host has written everything it was given."""
        while len(self):
            await self._ended.wait()

    def call_ended(self, message: wire.Written) -> None:
        """The host has ended a call."""
        job = self._jobs.get(message.id)
        if job is None:
            return
        for failure in message.failed:
            key = job.placed[failure.position][0].key
            if self._remove(job, key):
                self._failed(key, failure.outcome, failure.reason)
        done = tuple((failure.position, failure.reason) for failure in message.failed)
        self._emit([CallDone(Hop.WRITE, message.call, done)])

    def obey(self, command: WriteCommand) -> None:
        """What the core wants done."""
        match command:
            case WriteBegun():
                job = self._jobs[command.write]
                job.begun = True
                self._send(wire.Write(job.number, describe(job.placed, job.layers)))
            case Call():
                self._send(
                    wire.Push(
                        command.transfer, command.call, command.lo, command.hi, command.layer_lo, command.layer_hi
                    )
                )
            case ObjectsPublished():
                self._publish(self._jobs[command.write], command.objects)
            case ObjectsLost():
                self._give_up(self._jobs[command.transfer], command)
            case TransferDone():
                self._end(self._jobs.pop(command.transfer))

    def writing(self, keys: Iterable[bytes]) -> set[int]:
        """The writes, by number, with which some of these are on their way."""
        jobs: set[int] = set()
        for key in keys:
            jobs.update(self._by_key.get(key, ()))
        return jobs

    def when_ended(self, writes: Iterable[int], on_done: Callable[[], None]) -> Callable[[], None]:
        """Call `on_done` once all of these have ended, whatever became of their objects; perhaps at once.

        :param writes: by number, as of :meth:`writing`.
        :returns: see :meth:`.Waiters.wait`.
        """
        return self._waiters.wait((number for number in writes if number in self._jobs), on_done)

    def _publish(self, job: WriteJob, objects: Sequence[int]) -> None:
        self.written_at = time.monotonic()
        for position in objects:
            new, _ = job.placed[position]
            self._remove(job, new.key)
            self.written_objects += 1
            self.written_bytes += new.nbytes
            self._written(new)

    def _give_up(self, job: WriteJob, command: ObjectsLost) -> None:
        known = [at for at in command.objects if self._remove(job, job.placed[at][0].key)]
        if command.reason == SHED:
            self.shed_objects += len(known)
        if job.begun and known:
            self._send(wire.Drop(job.number, pack_u32(known)))

    def _remove(self, job: WriteJob, key: bytes) -> bool:
        """An object is lost or written; False = it has been already."""
        if job.positions.pop(key, None) is None:
            return False
        others = tuple(number for number in self._by_key.pop(key) if number != job.number)
        if others:
            self._by_key[key] = others
        return True

    def _end(self, job: WriteJob) -> None:
        for key in list(job.positions):
            self._remove(job, key)
        mine = self._by_step[job.step]
        mine.remove(job)
        if not mine:
            del self._by_step[job.step]
        if job.begun:
            self._send(wire.EndWrite(job.number))
        self._pool.release(job.owner)
        self._waiters.end((job.number,))
        self._ended.set()
        self._ended = anyio.Event()

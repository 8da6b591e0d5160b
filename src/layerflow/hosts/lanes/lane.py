"""What the host's threads have in common: an inbox, one thread, calls to the backend that cannot end it."""

from __future__ import annotations

import abc
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from layerflow.errors import LayerflowError
from layerflow.hosts.backend import Backend, BackendError, ObjectLocation, ObjectResult, ObjectStatus, Unreachable
from layerflow.hosts.objects import places_of
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.host_messages import ObjectFailure, Objects, Pull, Push, ToServer

log = structlog.get_logger(__name__)

Tell = Callable[[ToServer], None]
"""Sends to the server; any thread."""

Report = Callable[[tuple[ObjectFailure, ...]], None]
"""Tells of the end of a call: what failed since the one before."""

Item = TypeVar("Item")

RESTART_S = 0.1
"""Before a lane goes on whose thread has ended by an error; what it was at has been reported as failed."""

REASON_CHARS = 500
"""Native libraries put whole traces into their errors; a failure's reason is for one line of a log."""


OVERRUN_CALLS = 5
"""Native calls' time by which a call may outlive its own before it counts as hung."""

SLOWEST_BYTES_PER_S = 4 << 20
"""A call may take so much longer as its bytes take at this rate: a pool that is slower is no use."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call of a backend may take.

    :param call_s: a native call, whatever it moves.
    """

    call_s: float = 5.0

    def until(self, nbytes: int, now: float) -> float:
        """When a call that begins now should have returned."""
        return now + self.call_s + nbytes / SLOWEST_BYTES_PER_S


class Lane(abc.ABC, Generic[Item]):
    """A thread that is given items, and works on what they lead to.

    :param name: of the thread; shows in `top -H` and in traces.
    :param patience: how long a call of the backend may take.
    """

    def __init__(self, name: str, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.hung_at = math.inf  #: from then on the call that is under way counts as hung, on the monotonic clock
        self._inbox: list[Item] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = OwnedThread(f"layerflow-{name}", self._run, restart_s=RESTART_S)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Any thread."""
        with self._changed:
            self._inbox.append(item)
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """Take no more; leave what is open. Whether the thread has ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        return self._thread.join(timeout_s)

    @abc.abstractmethod
    def _accept(self, item: Item) -> None:
        """An item has come. May raise: it is logged, and the lane lives on."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """One call's worth of work, if there is any. May raise, like :meth:`_accept`, having ended what it was at."""

    @abc.abstractmethod
    def _patience(self) -> float | None:
        """How long it may sleep if nothing comes, in seconds: 0 = there is work; None = for ever."""

    @abc.abstractmethod
    def _leave(self) -> None:
        """The last thing on the thread: give back what is open."""

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._inbox and not self._stopping and (patience := self._patience()) != 0:
                    self._changed.wait(patience)
                if self._stopping:
                    break
                items, self._inbox = self._inbox, []
            for item in items:
                self._guarded(self._accept, item)
            self._guarded(self._turn)
        self._guarded(self._leave)

    @contextlib.contextmanager
    def under_way(self, nbytes: int) -> Iterator[float]:
        """Around one call of the backend: when it should have returned.

        Past it by the time of :data:`OVERRUN_CALLS` native calls it hangs. That ends the host, and with it the memory
        that it gives to a shared pool; so a service that is away for a while must not look like it.
        """
        until = self.patience.until(nbytes, time.monotonic())
        self.hung_at = until + OVERRUN_CALLS * self.patience.call_s
        try:
            yield until
        finally:
            self.hung_at = math.inf

    def _guarded(self, work: Callable[..., None], *items: Item) -> None:
        try:
            work(*items)
        except Exception as error:
            log.exception("lane_failed", lane=self._thread.name, error=describe(error))


@dataclass(slots=True, eq=False)
class HostJob:
    """Objects that travel together.

    :param places: those that have not failed, by position in the server's message.
    :param opened: the backend was told of these, and is to be told of their end.
    :param begun: it was told.
    :param refused: why none of it can be moved.
    """

    places: dict[int, ObjectLocation]
    opened: list[ObjectLocation] = field(default_factory=list)
    begun: bool = False
    refused: str = ""


class TransferLane(Lane[Item]):
    """A lane that moves the objects of jobs, by calls that the server hands out; it ends them in order."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        arena: SharedMemory,
        backend_calls: BackendCalls,
        patience: Patience | None,
    ) -> None:
        super().__init__(name, patience)
        self._backend, self._arena, self._backend_calls = backend, arena, backend_calls
        self._jobs: dict[int, HostJob] = {}
        self._waiting: deque[Item] = deque()

    @abc.abstractmethod
    def _obey(self, message: Item) -> None:
        """Carry one message out. May raise, having reported what it was at."""

    def _accept(self, item: Item) -> None:
        self._waiting.append(item)

    def _patience(self) -> float | None:
        return 0 if self._waiting else None

    def _turn(self) -> None:
        if self._waiting:
            self._obey(self._waiting.popleft())

    def _begin(self, number: int, objects: Objects) -> HostJob:
        """:raises LayerflowError: the job is impossible; its calls will be refused."""
        try:
            job = HostJob(dict(enumerate(places_of(objects, self._arena))))
        except LayerflowError as error:
            self._jobs[number] = HostJob({}, refused=str(error))
            raise
        self._jobs[number] = job
        return job

    def _call(self, message: Pull | Push, move: Callable[[HostJob, list[ObjectFailure]], None], tell: Report) -> None:
        """One call. Whatever happens, it is reported."""
        failed: list[ObjectFailure] = []
        try:
            job = self._jobs.get(message.id, HostJob({}, refused="the host does not know of this job"))
            if job.refused:
                failed = refuse(message, job.refused)
            else:
                move(job, failed)
        except BaseException:
            failed = refuse(message, "the host failed; see its log")
            raise
        finally:
            tell(tuple(failed))

    def _settle(
        self, job: HostJob, positions: Sequence[int], results: Sequence[ObjectResult], failed: list[ObjectFailure]
    ) -> list[ObjectLocation]:
        """What became of these; those that are not OK leave the job, and are returned."""
        left: list[ObjectLocation] = []
        for position, (outcome, reason) in zip(positions, results, strict=True):
            if outcome is not ObjectStatus.OK:
                left.append(job.places.pop(position))
                failed.append(ObjectFailure(position, int(outcome), reason[:REASON_CHARS]))
        return left


def refuse(message: Pull | Push, reason: str) -> list[ObjectFailure]:
    """All that a call carries has failed."""
    return [ObjectFailure(at, int(ObjectStatus.FAILED), reason) for at in range(message.lo, message.hi)]


class BackendCalls:
    """Calls the backend for a lane.

    :param suspect: told that the backend seems to be out of reach.
    """

    def __init__(self, suspect: Callable[[], None]) -> None:
        self.suspect = suspect

    def results(
        self, name: str, count: int, call: Callable[[], list[ObjectResult]], undo: Callable[[], None] | None = None
    ) -> list[ObjectResult]:
        """The backend's verdicts on `count` objects; an exception is the failure of all of them.

        :param undo: called then: what the backend had done until then is not known.
        """
        try:
            results = call()
            if len(results) != count:
                raise BackendError(f"the backend judged {len(results)} of {count} objects")
            return results
        except Unreachable as error:
            self.suspect()
            reason = f"unreachable: {error}"
        except Exception as error:
            log.exception("backend_call_failed", call=name, objects=count, error=describe(error))
            reason = f"{name}: {describe(error)}"
        if undo is not None:
            undo()
        return [ObjectResult(ObjectStatus.FAILED, reason)] * count

    def quietly(self, name: str, call: Callable[[], None]) -> None:
        """A call that promises never to raise."""
        try:
            call()
        except Exception as error:
            log.exception("backend_call_failed", call=name, error=describe(error))


def describe(error: BaseException) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARS]

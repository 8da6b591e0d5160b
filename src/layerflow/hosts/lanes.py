"""The threads of a host: what they have in common, and those that look up, fetch, write and check the pool's health."""

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

from layerflow.errors import LayerflowError, PoolError, shortened
from layerflow.hosts.backend import (
    OK,
    Backend,
    BackendError,
    ObjectLocation,
    ObjectResult,
    ObjectStatus,
    Unreachable,
    Unusable,
)
from layerflow.hosts.objects import places_of
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.host_messages import (
    Ask,
    Clear,
    Cleared,
    Drop,
    EndFetch,
    EndWrite,
    Fetch,
    Fetched,
    ObjectFailure,
    Objects,
    Present,
    Pull,
    Push,
    ToServer,
    Write,
    Written,
    split_keys,
)
from layerflow.wire.packing import list_u32

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
class CallTimeout:
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
    :param call_timeout: how long a call of the backend may take.
    """

    def __init__(self, name: str, call_timeout: CallTimeout | None = None) -> None:
        self.call_timeout = call_timeout or CallTimeout()
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
    def _poll_timeout_s(self) -> float | None:
        """How long it may sleep if nothing comes, in seconds: 0 = there is work; None = for ever."""

    @abc.abstractmethod
    def _leave(self) -> None:
        """The last thing on the thread: give back what is open."""

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._inbox and not self._stopping and (timeout_s := self._poll_timeout_s()) != 0:
                    self._changed.wait(timeout_s)
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
        until = self.call_timeout.until(nbytes, time.monotonic())
        self.hung_at = until + OVERRUN_CALLS * self.call_timeout.call_s
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
        call_timeout: CallTimeout | None,
    ) -> None:
        super().__init__(name, call_timeout)
        self._backend, self._arena, self._backend_calls = backend, arena, backend_calls
        self._jobs: dict[int, HostJob] = {}
        self._waiting: deque[Item] = deque()

    @abc.abstractmethod
    def _obey(self, message: Item) -> None:
        """Carry one message out. May raise, having reported what it was at."""

    def _accept(self, item: Item) -> None:
        self._waiting.append(item)

    def _poll_timeout_s(self) -> float | None:
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

    def _drop_failed(
        self, job: HostJob, positions: Sequence[int], results: Sequence[ObjectResult], failed: list[ObjectFailure]
    ) -> list[ObjectLocation]:
        """What became of these; those that are not OK leave the job, and are returned."""
        left: list[ObjectLocation] = []
        for position, (outcome, reason) in zip(positions, results, strict=True):
            if outcome is not ObjectStatus.OK:
                left.append(job.places.pop(position))
                failed.append(ObjectFailure(position, int(outcome), shortened(reason, REASON_CHARS)))
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
    return shortened(f"{type(error).__name__}: {error}", REASON_CHARS)


# The fetch thread: executes the calls that the server hands out, in order, one call of the backend each.


class FetchLane(TransferLane[Fetch | Pull | EndFetch]):
    """Items are messages.

    :param hide: told keys whose bytes are not those of the object.
    :param call_timeout: how long a call may take.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        tell: Tell,
        *,
        backend_calls: BackendCalls,
        hide: Callable[[Sequence[bytes]], None],
        call_timeout: CallTimeout | None = None,
    ) -> None:
        super().__init__("fetch", backend, arena, backend_calls, call_timeout)
        self._tell, self._hide = tell, hide

    def _obey(self, message: Fetch | Pull | EndFetch) -> None:
        match message:
            case Fetch():
                self._begin(message.id, message.objects)
            case Pull():
                self._call(
                    message,
                    lambda job, failed: self._move(job, message, failed),
                    lambda failed: self._tell(Fetched(message.id, message.call, failed)),
                )
            case EndFetch():
                self._end(message.id)

    def _move(self, job: HostJob, message: Pull, failed: list[ObjectFailure]) -> None:
        lo, hi = message.layer_lo, message.layer_hi
        if not job.begun:
            self._open(job, failed)
        mine = [at for at in range(message.lo, message.hi) if at in job.places]
        if not mine:
            return
        wanted = [job.places[at] for at in mine]
        nbytes = (hi - lo) * sum(place.layer_bytes for place in wanted)
        with self.under_way(nbytes) as until:
            results = self._backend_calls.results(
                "fetch", len(wanted), lambda: self._backend.fetch(wanted, lo, hi, until)
            )
        if not lo:
            results = [self._compare(*pair) for pair in zip(wanted, results, strict=True)]
        broken = [place.key for place, result in zip(wanted, results, strict=True) if result[0] is ObjectStatus.BROKEN]
        self._drop_failed(job, mine, results, failed)
        if broken:
            self._hide(broken)

    def _open(self, job: HostJob, failed: list[ObjectFailure]) -> None:
        """All objects at once: what that asks of the pool does not grow with the calls."""
        job.begun = True
        positions, places = list(job.places), list(job.places.values())
        with self.under_way(0) as until:
            results = self._backend_calls.results(
                "open_fetch", len(places), lambda: self._backend.open_fetch(places, until)
            )
        self._drop_failed(job, positions, results, failed)
        job.opened = list(job.places.values())

    def _compare(self, place: ObjectLocation, result: ObjectResult) -> ObjectResult:
        """The header has come with the first layer: is it that of the object?"""
        if result[0] is not ObjectStatus.OK:
            return result
        try:
            header = self._arena.read(place.offset, HEADER_BYTES)
            check_header(header, place.key, place.blocks)
        except PoolError as error:
            return ObjectResult(ObjectStatus.BROKEN, str(error))
        return OK

    def _end(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None and job.opened:
            with self.under_way(0):
                self._backend_calls.quietly("close_fetch", lambda: self._backend.close_fetch(job.opened))

    def _leave(self) -> None:
        for message in self._waiting:
            if isinstance(message, Pull):
                self._tell(Fetched(message.id, message.call, tuple(refuse(message, "the host stops"))))
        for number in list(self._jobs):
            self._end(number)


# The write thread: executes the calls that the server hands out, in order, one call of the backend each.


OPEN_PATIENCE_S = 0.5
"""How long a full pool may be tried for one job: it holds up the layers of all the others."""


class WriteLane(TransferLane[Write | Push | Drop | EndWrite]):
    """Items are messages.

    :param tell: sends the report of a call.
    :param call_timeout: how long a call may take.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        backend_calls: BackendCalls,
        tell: Callable[[Written], None],
        call_timeout: CallTimeout | None = None,
    ) -> None:
        super().__init__("write", backend, arena, backend_calls, call_timeout)
        self._tell = tell
        self._refused: dict[int, list[ObjectFailure]] = {}

    def _obey(self, message: Write | Push | Drop | EndWrite) -> None:
        match message:
            case Write():
                self._open(message)
            case Push():
                self._call(
                    message,
                    lambda job, failed: self._move(job, message, failed),
                    lambda failed: self._tell(Written(message.id, message.call, failed)),
                )
            case Drop():
                self._drop(message)
            case EndWrite():
                self._end(message.id)

    def _open(self, message: Write) -> None:
        """All objects at once, before their first layer is there: what that asks of the pool takes its time.

        What it refuses is reported with the first call.
        """
        job = self._begin(message.id, message.objects)
        positions, places = list(job.places), list(job.places.values())
        until = time.monotonic() + OPEN_PATIENCE_S
        with self.under_way(0):
            results = self._backend_calls.results(
                "open_write",
                len(places),
                lambda: self._backend.open_write(places, until),
                lambda: self._undo(message.id, places),
            )
        self._drop_failed(job, positions, results, self._refused.setdefault(message.id, []))

    def _move(self, job: HostJob, message: Push, failed: list[ObjectFailure]) -> None:
        failed += self._refused.pop(message.id, ())
        lo, hi = message.layer_lo, message.layer_hi
        mine = [at for at in range(message.lo, message.hi) if at in job.places]
        if not mine:
            return
        places = [job.places[at] for at in mine]
        if lo == hi:
            with self.under_way(0) as until:
                results = self._backend_calls.results(
                    "commit",
                    len(places),
                    lambda: self._backend.commit(places, until),
                    lambda: self._undo(message.id, places),
                )
            self._drop_failed(job, mine, results, failed)
            for at in mine:
                job.places.pop(at, None)
            return
        nbytes = (hi - lo) * sum(place.layer_bytes for place in places)
        with self.under_way(nbytes) as until:
            results = self._backend_calls.results(
                "write", len(places), lambda: self._backend.write(places, lo, hi, until)
            )
        self._revoke(self._drop_failed(job, mine, results, failed))

    def _drop(self, message: Drop) -> None:
        job = self._jobs.get(message.id)
        if job is not None:
            gone = [job.places.pop(at, None) for at in list_u32(message.positions)]
            self._revoke([place for place in gone if place is not None])

    def _revoke(self, places: list[ObjectLocation]) -> None:
        if places:
            with self.under_way(0):
                self._backend_calls.quietly("revoke", lambda: self._backend.revoke(places))

    def _undo(self, number: int, places: Sequence[ObjectLocation]) -> None:
        """After a call of job `number` that raised: any of these may be open at the backend, and none stays so.

        What another job has opened is that job's: this one was told, or would have been, that it exists.
        """
        others = {place.key for other, job in self._jobs.items() if other != number for place in job.places.values()}
        mine = [place for place in places if place.key not in others]
        self._backend_calls.quietly("revoke", lambda: self._backend.revoke(mine))

    def _end(self, number: int) -> None:
        self._refused.pop(number, None)
        job = self._jobs.pop(number, None)
        if job is not None:
            self._revoke(list(job.places.values()))

    def _leave(self) -> None:
        for message in self._waiting:
            if isinstance(message, Push):
                self._tell(Written(message.id, message.call, tuple(refuse(message, "the host stops"))))
        for number in list(self._jobs):
            self._end(number)


# The ask thread: what is there, and what is to be hidden or removed.


@dataclass(frozen=True, slots=True)
class Hide:
    """Hide objects whose bytes were found broken: 24-byte keys."""

    keys: Sequence[bytes]


MAX_DROPPED_PURGES = 64
"""Purges of which it is remembered that their keys were dropped: what comes of one later is not taken for all of it."""


class LookupLane(Lane[tuple[Ask | Clear, float] | Hide]):
    """Items are messages with the moment they came, and what the fetch thread found broken.

    :param backend_calls: is told where the backend seems to be out of reach.
    """

    def __init__(self, backend: Backend, tell: Tell, backend_calls: BackendCalls) -> None:
        super().__init__("ask")
        self._backend, self._tell, self._backend_calls = backend, tell, backend_calls
        self._waiting: deque[tuple[Ask | Clear, float] | Hide] = deque()
        self._named: dict[int, tuple[float, list[bytes]]] = {}  # by purge, until when, and its keys so far
        self._dropped: deque[int] = deque(maxlen=MAX_DROPPED_PURGES)  # whose time was over before their last keys came
        self.began = math.inf  #: when the call that is under way began, on the monotonic clock

    def _accept(self, item: tuple[Ask | Clear, float] | Hide) -> None:
        self._waiting.append(item)

    def _poll_timeout_s(self) -> float | None:
        return 0 if self._waiting else None

    def _turn(self) -> None:
        if not self._waiting:
            return
        item = self._waiting.popleft()
        self.began = time.monotonic()
        try:
            self._serve(item)
        finally:
            self.began = math.inf

    def _serve(self, item: tuple[Ask | Clear, float] | Hide) -> None:
        if isinstance(item, Hide):
            self._backend_calls.quietly("hide", lambda: self._backend.hide(item.keys))
        else:
            message, came = item
            until = came + message.timeout_ms / 1e3
            self._tell(self._answer(message, until) if isinstance(message, Ask) else self._clear(message, until))

    def _clear(self, message: Clear, until: float) -> Cleared:
        now = time.monotonic()
        self._dropped += (number for number, (end, _) in self._named.items() if end <= now)
        self._named = {number: (end, keys) for number, (end, keys) in self._named.items() if end > now}
        if message.id in self._dropped:
            why = "its time was over before its last keys came, and nothing was removed; purge again"
            return Cleared(message.id, 0, why)
        _, keys = self._named.setdefault(message.id, (until, []))
        keys += split_keys(message.keys)
        if not message.last:
            return Cleared(message.id, 0)
        del self._named[message.id]
        try:
            return Cleared(message.id, self._backend.clear(keys, until))
        except Unreachable as error:
            self._backend_calls.suspect()
            return Cleared(message.id, 0, f"unreachable: {error}")
        except Exception as error:
            if not isinstance(error, BackendError):
                log.exception("backend_call_failed", call="clear", error=describe(error))
            return Cleared(message.id, 0, str(error) if isinstance(error, BackendError) else describe(error))

    def _answer(self, message: Ask, until: float) -> Present:
        keys = split_keys(message.keys)
        if time.monotonic() >= until:
            return unknown(message, "the lookups before it took too long")
        try:
            present = self._backend.lookup(keys, until)
            if len(present) != len(keys):
                raise BackendError(f"the backend answered for {len(present)} of {len(keys)} keys")
        except Unreachable as error:
            self._backend_calls.suspect()
            return unknown(message, f"unreachable: {error}")
        except Exception as error:
            log.exception("backend_call_failed", call="lookup", objects=len(keys), error=describe(error))
            return unknown(message, describe(error))
        return Present(message.id, bytes(map(bool, present)))

    def _leave(self) -> None:
        self._waiting.clear()


def unknown(message: Ask, reason: str) -> Present:
    """Nothing could be learnt."""
    return Present(message.id, bytes(len(split_keys(message.keys))), reason)


# The check thread: is the pool alive? It tells the server of every change.


PERIOD_S = 0.5


class HealthCheck:
    """Looks after the backend once it is attached.

    :param down: told why it cannot be used.
    :param up: told that it can again.
    :param over: told why it never will, in this process.
    """

    def __init__(
        self,
        backend: Backend,
        down: Callable[[str], None],
        up: Callable[[], None],
        over: Callable[[str], None],
    ) -> None:
        self._backend, self._down, self._up, self._over = backend, down, up, over
        self._changed = threading.Condition()
        self._suspected = self._stopping = False
        self._thread = OwnedThread("layerflow-check", self._run, restart_s=PERIOD_S)
        self.reason = ""  #: why it is down; empty = it is up
        self.statistics: dict[str, float] = {}  #: the latest
        self.began = math.inf  #: when the check that is under way began, on the monotonic clock
        self._statistics_fail = False

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def suspect(self) -> None:
        """A call found it out of reach: look now. Any thread."""
        with self._changed:
            self._suspected = True
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """Whether the thread has ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        return self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self.began = time.monotonic()
            try:
                self._look()
            except Unusable as error:
                self._over(str(error))
                return
            self.began = math.inf
            with self._changed:
                if not self._suspected and not self._stopping:
                    self._changed.wait(PERIOD_S)
                if self._stopping:
                    return
                self._suspected = False

    def _look(self) -> None:
        try:
            self._backend.check()
            reason = ""
        except Unusable:
            raise
        except Unreachable as error:
            reason = str(error) or "it does not answer"
        except Exception as error:
            reason = describe(error)
            if reason != self.reason:
                log.exception("backend_call_failed", call="check", error=reason)
        if reason != self.reason:
            was, self.reason = self.reason, reason
            if reason:
                self._down(reason)
            elif was:
                self._up()
        self._count()

    def _count(self) -> None:
        try:
            self.statistics = self._backend.statistics()
            self._statistics_fail = False
        except Exception as error:
            if not self._statistics_fail:
                log.exception("backend_call_failed", call="statistics", error=describe(error))
            self._statistics_fail = True

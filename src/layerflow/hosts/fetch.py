"""The fetch thread: jobs in slices of layers, in turn, so that all sessions' first layers come early."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layerflow.errors import LayerflowError, PoolError
from layerflow.hosts.backend import OK, Backend, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.lane import BackendCalls, HostJob, Lane, Tell
from layerflow.hosts.objects import count_of, places_of
from layerflow.memfd import SharedMemory
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.wire.host_messages import Fetch, Fetched, ObjectFailure, Unfetch

FIRST_SLICE_BYTES, LAST_SLICE_BYTES = 1 << 20, 8 << 20
CALL_S = 3e-3
"""A call moves at least so much, doubling from the first while calls take less than this: an engine that starts needs
its next layers soon, and is ahead of them later; a call and its report cost some 0.3 ms each, and the other jobs wait
for a call to end. Mooncake, for one, moves 4 MiB some 1.4 times as fast in one call as in two."""


@dataclass(slots=True, eq=False)
class FetchJob(HostJob):
    """:param at: so many leading layers have come. :param opened: to be closed when the job ends.

    :param slice_bytes: what the next call after the first layer's moves, at least.
    """

    at: int = 0
    slice_bytes: int = FIRST_SLICE_BYTES
    opened: list[ObjectLocation] = field(default_factory=list)
    wanted: bool = True


class FetchLane(Lane[tuple[Fetch | Unfetch, float]]):
    """Items are messages with the moment they came.

    :param hide: told keys whose bytes are not those of the object.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        tell: Tell,
        backend_calls: BackendCalls,
        hide: Callable[[Sequence[bytes]], None],
    ) -> None:
        super().__init__("fetch")
        self._backend, self._arena, self._tell, self._backend_calls, self._hide = (
            backend,
            arena,
            tell,
            backend_calls,
            hide,
        )
        self._jobs: dict[int, FetchJob] = {}
        self._new: deque[FetchJob] = deque()
        self._begun: deque[FetchJob] = deque()

    def _accept(self, item: tuple[Fetch | Unfetch, float]) -> None:
        message, came = item
        if isinstance(message, Unfetch):
            if message.id in self._jobs:
                self._jobs[message.id].wanted = False
            return
        try:
            places = dict(enumerate(places_of(message.objects, self._arena)))
        except LayerflowError as error:
            reason = str(error)
            failed = tuple(
                ObjectFailure(at, int(ObjectStatus.FAILED), reason) for at in range(count_of(message.objects))
            )
            self._tell(Fetched(message.id, 0, True, failed))
            raise
        job = FetchJob(message.id, places, message.objects.layers, came + message.timeout_ms / 1e3)
        self._jobs[job.id] = job
        self._new.append(job)

    def _patience(self) -> float | None:
        return 0 if self._jobs else None

    def _turn(self) -> None:
        """One slice of one job: a new one's first layer, for its engine waits; else the next of those under way."""
        if not self._jobs:
            return
        job = (self._new or self._begun).popleft()
        try:
            self._slice(job)
        except BaseException:
            job.fail("the host failed; see its log")
            raise
        finally:
            if job.places and job.at < job.layers:
                self._begun.append(job)
            else:
                self._end(job)

    def _slice(self, job: FetchJob) -> None:
        if not job.wanted:
            job.fail("nobody wants it any more")
        elif time.monotonic() >= job.until:
            job.fail("its time ran out")
        elif not job.at and job.places:
            self._open(job)
        if not job.places:
            return
        lo, positions, places = job.at, list(job.places), list(job.places.values())
        hi = min(job.layers, lo + -(-job.slice_bytes // job.layer_bytes)) if lo else 1
        began = time.monotonic()
        results = self._backend_calls.results(
            "fetch", len(places), lambda: self._backend.fetch(places, lo, hi, job.until)
        )
        if lo and time.monotonic() - began < CALL_S:
            job.slice_bytes = min(2 * job.slice_bytes, LAST_SLICE_BYTES)
        if not lo:
            results = [self._compare(*pair) for pair in zip(places, results, strict=True)]
        broken = [place.key for place, result in zip(places, results, strict=True) if result[0] is ObjectStatus.BROKEN]
        job.settle(positions, results)
        if broken:
            self._hide(broken)
        job.at = hi
        if job.places and hi < job.layers:
            self._tell(Fetched(job.id, hi, False, job.take_failures()))

    def _open(self, job: FetchJob) -> None:
        places = list(job.places.values())
        results = self._backend_calls.results(
            "open_fetch", len(places), lambda: self._backend.open_fetch(places, job.until)
        )
        job.opened = [place for place, result in zip(places, results, strict=True) if result[0] is ObjectStatus.OK]
        job.settle(list(job.places), results)

    def _compare(self, place: ObjectLocation, result: ObjectResult) -> ObjectResult:
        """The header has come with the first layer: is it that of the object?"""
        if result[0] is not ObjectStatus.OK:
            return result
        try:
            header = self._arena.view[place.offset : place.offset + HEADER_BYTES]
            check_header(header, place.key, place.blocks)
        except PoolError as error:
            return ObjectResult(ObjectStatus.BROKEN, str(error))
        return OK

    def _end(self, job: FetchJob) -> None:
        del self._jobs[job.id]
        if job.opened:
            self._backend_calls.quietly("close_fetch", lambda: self._backend.close_fetch(job.opened))
        self._tell(Fetched(job.id, job.at, True, job.take_failures()))

    def _leave(self) -> None:
        for job in list(self._jobs.values()):
            job.fail("the host stops")
            self._end(job)

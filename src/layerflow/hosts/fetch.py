"""The fetch thread: executes the calls that the server hands out, in order, one call of the backend each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layerflow.errors import LayerflowError, PoolError
from layerflow.hosts.backend import OK, Backend, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.lane import REASON_CHARS, BackendCalls, Lane, Patience, Tell
from layerflow.hosts.objects import places_of
from layerflow.memfd import SharedMemory
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.wire.host_messages import EndFetch, Fetch, Fetched, ObjectFailure, Pull


@dataclass(slots=True, eq=False)
class FetchJob:
    """:param places: objects that have not failed, by position. :param opened: to be closed when the job ends.

    :param begun: its first call has come. :param refused: why none of it can be fetched.
    """

    places: dict[int, ObjectLocation]
    opened: list[ObjectLocation] = field(default_factory=list)
    begun: bool = False
    refused: str = ""


class FetchLane(Lane[Fetch | Pull | EndFetch]):
    """Items are messages.

    :param hide: told keys whose bytes are not those of the object.
    :param patience: how long a call may take.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        tell: Tell,
        backend_calls: BackendCalls,
        hide: Callable[[Sequence[bytes]], None],
        patience: Patience | None = None,
    ) -> None:
        super().__init__("fetch", patience)
        self._backend, self._arena, self._tell, self._backend_calls, self._hide = (
            backend,
            arena,
            tell,
            backend_calls,
            hide,
        )
        self._jobs: dict[int, FetchJob] = {}
        self._waiting: deque[Fetch | Pull | EndFetch] = deque()

    def _accept(self, item: Fetch | Pull | EndFetch) -> None:
        self._waiting.append(item)

    def _patience(self) -> float | None:
        return 0 if self._waiting else None

    def _turn(self) -> None:
        if not self._waiting:
            return
        match self._waiting.popleft():
            case Fetch() as message:
                self._begin(message)
            case Pull() as message:
                self._pull(message)
            case EndFetch() as message:
                self._end(message.id)

    def _begin(self, message: Fetch) -> None:
        try:
            self._jobs[message.id] = FetchJob(dict(enumerate(places_of(message.objects, self._arena))))
        except LayerflowError as error:
            self._jobs[message.id] = FetchJob({}, refused=str(error))
            raise

    def _pull(self, message: Pull) -> None:
        """One call. Whatever happens, it is reported."""
        failed: list[ObjectFailure] = []
        try:
            job = self._jobs.get(message.id, FetchJob({}, refused="the host does not know of this fetch"))
            if job.refused:
                failed = refuse(message, job.refused)
            else:
                self._move(job, message, failed)
        except BaseException:
            failed = refuse(message, "the host failed; see its log")
            raise
        finally:
            self._tell(Fetched(message.id, message.call, tuple(failed)))

    def _move(self, job: FetchJob, message: Pull, failed: list[ObjectFailure]) -> None:
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
        self._settle(job, mine, results, failed)
        if broken:
            self._hide(broken)

    def _open(self, job: FetchJob, failed: list[ObjectFailure]) -> None:
        """All objects at once: what that asks of the pool does not grow with the calls."""
        job.begun = True
        positions, places = list(job.places), list(job.places.values())
        with self.under_way(0) as until:
            results = self._backend_calls.results(
                "open_fetch", len(places), lambda: self._backend.open_fetch(places, until)
            )
        self._settle(job, positions, results, failed)
        job.opened = list(job.places.values())

    def _settle(
        self, job: FetchJob, positions: list[int], results: list[ObjectResult], failed: list[ObjectFailure]
    ) -> None:
        for position, (outcome, reason) in zip(positions, results, strict=True):
            if outcome is not ObjectStatus.OK:
                del job.places[position]
                failed.append(ObjectFailure(position, int(outcome), reason[:REASON_CHARS]))

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


def refuse(message: Pull, reason: str) -> list[ObjectFailure]:
    """All that a call carries has failed."""
    return [ObjectFailure(at, int(ObjectStatus.FAILED), reason) for at in range(message.lo, message.hi)]

"""The fetch thread: executes the calls that the server hands out, in order, one call of the backend each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerflow.errors import PoolError
from layerflow.hosts.backend import OK, Backend, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.lanes.lane import BackendCalls, HostJob, Patience, Tell, TransferLane, refuse
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import EndFetch, Fetch, Fetched, ObjectFailure, Pull


class FetchLane(TransferLane[Fetch | Pull | EndFetch]):
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
        super().__init__("fetch", backend, arena, backend_calls, patience)
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
        self._settle(job, mine, results, failed)
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
        self._settle(job, positions, results, failed)
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

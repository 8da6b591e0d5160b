"""The write thread: executes the calls that the server hands out, in order, one call of the backend each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from layerflow.hosts.backend import Backend, ObjectLocation
from layerflow.hosts.lanes.lane import BackendCalls, HostJob, Patience, TransferLane, refuse
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Drop, EndWrite, ObjectFailure, Push, Write, Written
from layerflow.wire.packing import list_u32

OPEN_PATIENCE_S = 0.5
"""How long a full pool may be tried for one job: it holds up the layers of all the others."""


class WriteLane(TransferLane[Write | Push | Drop | EndWrite]):
    """Items are messages.

    :param tell: sends the report of a call.
    :param patience: how long a call may take.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        backend_calls: BackendCalls,
        tell: Callable[[Written], None],
        patience: Patience | None = None,
    ) -> None:
        super().__init__("write", backend, arena, backend_calls, patience)
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
        self._settle(job, positions, results, self._refused.setdefault(message.id, []))

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
            self._settle(job, mine, results, failed)
            for at in mine:
                job.places.pop(at, None)
            return
        nbytes = (hi - lo) * sum(place.layer_bytes for place in places)
        with self.under_way(nbytes) as until:
            results = self._backend_calls.results(
                "write", len(places), lambda: self._backend.write(places, lo, hi, until)
            )
        self._revoke(self._settle(job, mine, results, failed))

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

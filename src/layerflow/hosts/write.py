"""The write thread: each job's layers as they land in the arena, several in one call where they have piled up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layerflow.errors import LayerflowError
from layerflow.flow.hosts.pace import Pace
from layerflow.hosts.backend import Backend, ObjectLocation, ObjectStatus
from layerflow.hosts.lane import BackendCalls, HostJob, Lane, Patience, Tell
from layerflow.hosts.objects import count_of, places_of
from layerflow.memfd import SharedMemory
from layerflow.wire.host_messages import Advance, Drop, Finish, ObjectFailure, Write, Written, unpack_u32

OPEN_PATIENCE_S = 0.5
"""How long a full pool may be tried for one job: it holds up the layers of all the others."""


@dataclass(slots=True, eq=False)
class WriteJob(HostJob):
    """:param available: so many leading layers are in the arena. :param written: so many are in the pool.

    :param at: first object of the next layer that is not written, by position.
    :param most_blocks: of one call. :param most_bytes: of one call.
    :param finishing: the headers are in the arena too: publish once all is written.
    :param dropped: positions that will not be finished.
    """

    available: int = 0
    written: int = 0
    at: int = 0
    most_blocks: int = 4096
    most_bytes: int = 64 << 20
    opened: bool = False
    finishing: bool = False
    dropped: set[int] = field(default_factory=set)

    def next_cut(self, most_bytes: int) -> tuple[list[int], int]:
        """Positions of the next call, and the layer where it ends: layers of all objects, or objects of one layer."""
        most_bytes = min(most_bytes, self.most_bytes)
        positions = [at for at in self.places if at >= self.at]
        blocks = sum(place.blocks for place in self.places.values())
        if len(positions) == len(self.places) and self.layer_bytes <= most_bytes and blocks <= self.most_blocks:
            layers = min(most_bytes // self.layer_bytes, self.most_blocks // blocks, self.available - self.written)
            return positions, self.written + layers
        nbytes = blocks = 0
        for count, at in enumerate(positions):
            nbytes += self.places[at].layer_bytes
            blocks += self.places[at].blocks
            if count and (nbytes > most_bytes or blocks > self.most_blocks):
                return positions[:count], self.written + 1
        return positions, self.written + 1

    @property
    def ready(self) -> bool:
        """Whether there is something to do."""
        begun = self.opened and self.written == self.available
        return not begun or self.finishing or bool(self.dropped) or not self.places


class WriteLane(Lane[tuple[Write | Advance | Finish | Drop, float]]):
    """Items are messages with the moment they came.

    :param published: sends the report of a write that published these places.
    """

    def __init__(
        self,
        backend: Backend,
        arena: SharedMemory,
        tell: Tell,
        backend_calls: BackendCalls,
        published: Callable[[Sequence[ObjectLocation], Written], None],
        patience: Patience | None = None,
    ) -> None:
        super().__init__("write", patience)
        self._backend, self._arena, self._tell, self._backend_calls = backend, arena, tell, backend_calls
        self._published = published
        self._pace = Pace()
        self._jobs: dict[int, WriteJob] = {}
        self._turns: deque[WriteJob] = deque()

    def _accept(self, item: tuple[Write | Advance | Finish | Drop, float]) -> None:
        message, came = item
        if isinstance(message, Write):
            self._begin(message, came)
            return
        job = self._jobs.get(message.id)
        if job is None:  # it ended by itself while this was under way
            return
        match message:
            case Advance():
                job.available = max(job.available, min(message.layers, job.layers))
            case Finish():
                job.available = job.layers
                job.finishing = True
            case Drop():
                job.dropped |= set(unpack_u32(message.positions)) & job.places.keys()

    def _begin(self, message: Write, came: float) -> None:
        try:
            places = dict(enumerate(places_of(message.objects, self._arena)))
        except LayerflowError as error:
            reason = str(error)
            failed = tuple(
                ObjectFailure(at, int(ObjectStatus.FAILED), reason) for at in range(count_of(message.objects))
            )
            self._tell(Written(message.id, failed))
            raise
        layers = message.objects.layers
        job = WriteJob(
            message.id,
            places,
            layers,
            came + message.timeout_ms / 1e3,
            available=min(message.layers, layers),
            most_blocks=message.most_blocks,
            most_bytes=message.most_bytes,
        )
        self._jobs[job.id] = job
        self._turns.append(job)

    def _patience(self) -> float | None:
        if not self._jobs:
            return None
        if any(job.ready for job in self._turns):
            return 0
        return max(0.0, min(job.until for job in self._turns) - time.monotonic())

    def _turn(self) -> None:
        """One call's worth of the next job that has something to do."""
        now = time.monotonic()
        for _ in range(len(self._turns)):
            job = self._turns[0]
            self._turns.rotate(-1)
            if job.ready or now >= job.until:
                break
        else:
            return
        try:
            self._serve(job, now)
        except BaseException:
            self._give_up(job, "the host failed; see its log")
            raise

    def _serve(self, job: WriteJob, now: float) -> None:
        if job.dropped:
            self._withdraw(job)
        if now >= job.until:
            self._give_up(job, "its time ran out")
            return
        if job.places and not job.opened:
            self._open(job, now)
        if job.places and job.written < job.available:
            self._write(job)
        if job.places and job.finishing and job.written == job.layers:
            self._commit(job)
        elif not job.places:
            self._end(job)

    def _withdraw(self, job: WriteJob) -> None:
        gone = [job.places.pop(position) for position in sorted(job.dropped)]
        job.failures += [
            ObjectFailure(position, int(ObjectStatus.FAILED), "dropped") for position in sorted(job.dropped)
        ]
        job.dropped.clear()
        self._revoke(job, gone)

    def _open(self, job: WriteJob, now: float) -> None:
        places, until = list(job.places.values()), min(job.until, now + OPEN_PATIENCE_S)
        with self.under_way(0):
            results = self._backend_calls.results(
                "open_write", len(places), lambda: self._backend.open_write(places, until)
            )
        job.opened = True
        job.settle(list(job.places), results)

    def _write(self, job: WriteJob) -> None:
        positions, hi = job.next_cut(self._pace.nbytes)
        places, lo = [job.places[at] for at in positions], job.written
        if not places:  # what was left of the layer was dropped
            job.written, job.at = lo + 1, 0
            return
        nbytes = (hi - lo) * sum(place.layer_bytes for place in places)
        began = time.monotonic()
        with self.under_way(nbytes) as until:
            results = self._backend_calls.results(
                "write", len(places), lambda: self._backend.write(places, lo, hi, until)
            )
        self._pace.ended(nbytes, time.monotonic() - began)
        if positions[-1] == max(job.places):
            job.written, job.at = hi, 0
        else:
            job.at = positions[-1] + 1
        self._revoke(job, job.settle(positions, results))

    def _commit(self, job: WriteJob) -> None:
        places = list(job.places.values())
        with self.under_way(0) as until:
            results = self._backend_calls.results("commit", len(places), lambda: self._backend.commit(places, until))
        job.settle(list(job.places), results)
        self._end(job)

    def _give_up(self, job: WriteJob, reason: str) -> None:
        self._revoke(job, job.fail(reason))
        self._end(job)

    def _revoke(self, job: WriteJob, places: list[ObjectLocation]) -> None:
        if places and job.opened:
            with self.under_way(0):
                self._backend_calls.quietly("revoke", lambda: self._backend.revoke(places))

    def _end(self, job: WriteJob) -> None:
        if self._jobs.pop(job.id, None) is not None:
            self._turns.remove(job)
            self._published(list(job.places.values()), Written(job.id, job.take_failures()))

    def _leave(self) -> None:
        for job in list(self._jobs.values()):
            self._give_up(job, "the host stops")

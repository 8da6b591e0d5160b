"""The core's memory, and what it keeps per session: deadlines, turns, counters."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerflow.errors import InvalidTransition
from layerflow.flow.budget import Budget
from layerflow.flow.events import Direction, Event, Hop, Limits
from layerflow.flow.graph import (
    Accounting,
    FlowStep,
    Incoming,
    IncomingFetch,
    InFlightBatch,
    Session,
    Transfer,
    TransferJob,
    WriteTransfer,
)
from layerflow.flow.host_lane import HostLane
from layerflow.flow.ring import SessionRing


@dataclass(slots=True)
class Counters:
    """Totals since the core was made. Parts are (request, group) pairs of one step and direction."""

    tries: int = 0
    batches: int = 0
    batches_failed: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    failed_parts: int = 0
    committed_parts: int = 0
    revoked_parts: int = 0
    shed_parts: int = 0
    aborted_requests: int = 0
    expired_jobs: int = 0
    steps_done: int = 0
    sessions_lost: int = 0
    late_reports: int = 0
    fetched_objects: int = 0
    fetched_bytes: int = 0
    expired_fetches: int = 0
    written_objects: int = 0
    written_bytes: int = 0
    shed_writes: int = 0
    follows: int = 0


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """A snapshot. Sizes in bytes; the second half counts since the core was made.

    :param failed_parts: load parts of which a block was reported as failed.
    :param revoked_parts: save parts given back, shed ones included.
    :param expired_jobs: loads or saves of a step cut at their deadline.
    :param expired_fetches: fetches given up because nothing came of them.
    :param write_backlog_bytes: of objects that are on their way to the backend.
    :param shed_writes: objects for which the backlog had no room.
    :param following: follows that are not over. :param follows: how many began.
    :param tries: how often a session was asked for its next batch.
    :param late_reports: events about steps, batches or sessions that are gone; harmless.
    """

    sessions: int
    steps: int
    load_inflight_bytes: int
    save_inflight_bytes: int
    load_inflight_batches: int
    save_inflight_batches: int
    unsaved_bytes: int
    fetches: int
    fetch_inflight_bytes: int
    writes: int
    write_inflight_bytes: int
    write_backlog_bytes: int
    following: int
    tries: int
    batches: int
    batches_failed: int
    loaded_bytes: int
    saved_bytes: int
    failed_parts: int
    committed_parts: int
    revoked_parts: int
    shed_parts: int
    aborted_requests: int
    expired_jobs: int
    steps_done: int
    sessions_lost: int
    late_reports: int
    fetched_objects: int
    fetched_bytes: int
    expired_fetches: int
    written_objects: int
    written_bytes: int
    shed_writes: int
    follows: int


Timed = FlowStep | IncomingFetch

_SLACK = 16


class Deadlines:
    """When which step or fetch next wants to be looked at. Each has at most one valid entry: its `alarm`."""

    __slots__ = ("_armed", "_heap", "_number")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._number = 0
        self._armed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, step: Timed, when: float) -> None:
        """Look at `step` at `when`; ``inf`` = no more."""
        if step.alarm == when:
            return
        self._armed += (when != math.inf) - (step.alarm != math.inf)
        step.alarm = when
        if when != math.inf:
            self._number += 1
            heapq.heappush(self._heap, (when, self._number, step))
        if not self._armed:
            self._heap.clear()
        elif len(self._heap) > 2 * self._armed + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].alarm == entry[0]]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Timed | None:
        """What has an alarm that has passed, the alarm cleared; None when there is none."""
        while self._heap and self._heap[0][0] <= now:
            when, _, step = heapq.heappop(self._heap)
            if step.alarm == when:
                step.alarm = math.inf
                self._armed -= 1
                return step
        return None

    def earliest(self) -> float:
        """The next alarm; ``inf`` when there is none."""
        while self._heap and self._heap[0][2].alarm != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf


class State:
    """The core's memory: O(steps' parts + objects on their way + batches in flight)."""

    __slots__ = (
        "budget",
        "cancelled_saves",
        "committed_saves",
        "counters",
        "deadlines",
        "dirty_steps",
        "fetches",
        "finished_loads",
        "forgotten",
        "in_flight",
        "incoming",
        "newest_incoming",
        "newest_session",
        "newest_write",
        "next_batch",
        "paused",
        "peers",
        "progressed_saves",
        "rings",
        "sessions",
        "wake",
        "writes",
    )

    def __init__(self, limits: Limits) -> None:
        self.budget = Budget(limits)
        self.rings = (SessionRing(Direction.LOAD), SessionRing(Direction.SAVE))
        self.fetches: HostLane[IncomingFetch] = HostLane(Hop.FETCH)
        self.peers: HostLane[IncomingFetch] = HostLane(Hop.PEER)
        self.writes: HostLane[WriteTransfer] = HostLane(Hop.WRITE)
        self.deadlines = Deadlines()
        self.counters = Counters()
        self.sessions: dict[int, Session] = {}
        self.in_flight: dict[int, InFlightBatch] = {}
        self.incoming: dict[int, Incoming] = {}
        self.newest_incoming = 0
        self.newest_write = 0
        self.progressed_saves: list[Transfer] = []
        self.committed_saves: list[Transfer] = []
        self.cancelled_saves: list[tuple[Transfer, Sequence[int], str]] = []
        self.dirty_steps: list[FlowStep] = []
        self.finished_loads: list[TransferJob] = []
        self.forgotten: list[FlowStep] = []
        self.next_batch = 1
        self.paused = False
        self.newest_session = -1
        self.wake = math.inf

    def lane_of(self, hop: Hop) -> HostLane[IncomingFetch]:
        """What moves the fetches of a hop."""
        return self.peers if hop is Hop.PEER else self.fetches

    def session(self, number: int) -> Session | None:
        """A live session; None = lost, its reports are late.

        :raises InvalidTransition: for a session that was never opened.
        """
        session = self.sessions.get(number)
        if session is None:
            if number > self.newest_session:
                raise InvalidTransition(f"session {number} was never opened; send SessionOpened first")
            self.counters.late_reports += 1
        return session

    def step(self, event: Event, session_number: int, number: int) -> FlowStep | None:
        """A live step, with `event` added to its story; None = finished or never opened, the event is late."""
        session = self.session(session_number)
        if session is None:
            return None
        step = session.steps.get(number)
        if step is None:
            self.counters.late_reports += 1
            return None
        step.heard(event)
        return step

    def enqueue(self, job: TransferJob) -> None:
        """The job has something to be granted: keep it, and queue its session unless all of it waits."""
        session = job.step.session
        session.pending[job.direction][job.step.number] = job
        if job.head() is not None:
            self.rings[job.direction].join(session)

    def change_limits(self, limits: Limits) -> None:
        """New caps. Gated batches beyond what those allow are charged no more: they must not hold up others.

        :raises ConfigError: for limits that no transfer could meet; the old ones stay.
        """
        budget = self.budget
        budget.change(limits)
        for direction in Direction:
            if budget.gated[direction] > budget.most_gated[direction]:
                for batch in self.in_flight.values():
                    if batch.accounting is Accounting.GATED and batch.transfer.job.direction is direction:
                        budget.stop_charging(batch)

    def permit(self, session: Session, direction: Direction) -> None:
        """More of the session may be permitted now."""
        if session.pending[direction]:
            self.rings[direction].join(session)

    def stop_charging(self, transfers: Iterable[Transfer]) -> None:
        """Stop charging the budget for the batches of these transfers.

        The core still waits for their end, but a slow lane must not block other sessions.
        """
        for transfer in transfers:
            for batch in transfer.in_flight.values():
                self.budget.stop_charging(batch)

    def dequeue(self, job: TransferJob) -> None:
        """Nothing is left to be granted of the job."""
        job.step.session.pending[job.direction].pop(job.step.number, None)

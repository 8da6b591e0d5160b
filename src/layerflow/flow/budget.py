"""The caps: what one batch may carry and what may be in flight.

Every granted batch is charged until its end is reported, whether its lane can move it already or holds it
until the forward pass has come far enough (a *gated* batch). The sum of what is charged never exceeds
`max_granted_bytes`, so a lane that moves a batch as soon as its gate opens needs no further permission.
What hosts move counts for itself (:mod:`layerflow.flow.host_lane`), and loads by a plan in their worker's window.

Gated batches wait for an engine, which may be slow or stopped; they must not keep others from moving.
So each direction leaves room for one whole batch that nothing gated may take, and every session gets an
even share of what gated batches may take.

Saves are granted up to half of the budget. Where several sessions share it, loads leave room for one whole batch of
saves: a decoder that is stopped in the middle of its loads does not hold up what a prefiller saves. What was called
back (a fence, a deadline) is charged no more: an engine that does not answer holds up nobody else.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter

from layerflow.errors import ConfigError
from layerflow.flow.events import LOAD, SAVE, Direction, Limits
from layerflow.flow.graph import Accounting, InFlightBatch, Session, TransferJob

# Bound once, as LOAD and SAVE are.
_BUDGET, _GATED, _NONE = Accounting.BUDGET, Accounting.GATED, Accounting.NONE


class Budget:
    """Bytes granted and not yet reported, against the limits. Lists are by direction.

    :ivar charged: what counts against the budget.
    :ivar gated: the part of it that cannot move yet.
    :ivar most_gated: how much that may be, over all sessions.
    :ivar sessions: how many share it.
    :ivar regrown: the sessions' shares may have become larger.
    :ivar ungated: sessions that have fewer gated bytes than when this was last cleared.
    :ivar ceiling: the most that may be charged: loads, saves, and both; more than the limits while batches that
        were granted under earlier limits are in flight.
    :raises ConfigError: for limits that no transfer could meet.
    """

    __slots__ = (
        "batches", "ceiling", "charged", "gated", "half", "inflight", "limits", "max_batch", "most_gated", "regrown",
        "sessions", "ungated",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.inflight = [0, 0]
        self.batches = [0, 0]
        self.charged = [0, 0]
        self.gated = [0, 0]
        self.regrown = False
        self.ungated: dict[Session, None] = {}
        self.sessions = 0
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """New caps for every batch from now on. What is granted stays granted."""
        for name, least in (("max_transfer_blocks", 1), ("max_transfer_bytes", 1), ("max_granted_bytes", 2)):
            if getattr(limits, name) < least:
                raise ConfigError(f"{name} {getattr(limits, name)} must be at least {least}, or nothing can ever move")
        for name in ("prefetch_layers", "save_backlog_bytes", "stagger_us"):
            if getattr(limits, name) < 0:
                raise ConfigError(f"{name} {getattr(limits, name)} must be 0 (off) or positive")
        self.limits = limits
        whole = limits.max_granted_bytes
        self.half = whole // 2
        loads, saves = self.charged
        self.ceiling = (max(whole, loads), max(self.half, saves), max(whole, loads + saves))
        rooms = (whole - self.half, self.half)
        # Where there are gated batches, they are left at least half of their direction's room.
        most = (rooms[0] // 2 if limits.prefetch_layers else rooms[0], rooms[1] // 2)
        self.max_batch = tuple(max(1, min(limits.max_transfer_bytes, nbytes)) for nbytes in most)
        self.most_gated = tuple(room - batch for room, batch in zip(rooms, self.max_batch, strict=True))

    def fits(self, direction: Direction, nbytes: int) -> bool:
        """Whether there is room for a batch of `nbytes`."""
        loads, saves = self.charged
        if direction is SAVE and saves + nbytes > self.half:
            return False
        if direction is LOAD and self.sessions > 1:
            nbytes += max(0, self.max_batch[SAVE] - saves)
        return loads + saves + nbytes <= self.limits.max_granted_bytes

    def has_gated_room(self, direction: Direction, nbytes: int) -> bool:
        """Whether all gated batches together leave room for one more of `nbytes`."""
        return self.gated[direction] + nbytes <= self.most_gated[direction]

    def within_share(self, session: Session, direction: Direction, nbytes: int) -> bool:
        """Whether the session's own gated batches leave it room for one more of `nbytes`."""
        own = session.gated[direction]
        # A share may be smaller than one batch, which must not keep every session from being granted any.
        return not own or own + nbytes <= self.most_gated[direction] // self.sessions

    def take(self, batch: InFlightBatch) -> None:
        """A batch was granted."""
        job = batch.transfer.job
        direction, nbytes = job.direction, batch.nbytes
        self.inflight[direction] += nbytes
        self.batches[direction] += 1
        self.charged[direction] += nbytes
        if batch.gate >= 0 and batch.gate > job.gates_open_to:
            batch.accounting = _GATED
            self.gated[direction] += nbytes
            job.step.session.gated[direction] += nbytes
            if job.gated and job.gated[-1].gate > batch.gate:
                insort(job.gated, batch, key=_gate)
            else:
                job.gated.append(batch)

    def open_gates(self, job: TransferJob) -> None:
        """The forward pass has come further: of the job's batches, some can move now."""
        ready = bisect_right(job.gated, job.gates_open_to, key=_gate)
        for batch in job.gated[:ready]:
            if batch.accounting is _GATED:
                batch.accounting = _BUDGET
                self._ungate(batch)
        del job.gated[:ready]

    def stop_charging(self, batch: InFlightBatch) -> None:
        """A batch was called back: it is awaited, and charged no more."""
        if batch.accounting is _NONE:
            return
        if batch.accounting is _GATED:
            self._ungate(batch)
        self.charged[batch.transfer.job.direction] -= batch.nbytes
        batch.accounting = _NONE

    def give(self, batch: InFlightBatch) -> None:
        """A batch ended."""
        self.stop_charging(batch)
        direction = batch.transfer.job.direction
        self.inflight[direction] -= batch.nbytes
        self.batches[direction] -= 1

    def _ungate(self, batch: InFlightBatch) -> None:
        job = batch.transfer.job
        self.gated[job.direction] -= batch.nbytes
        job.step.session.gated[job.direction] -= batch.nbytes
        self.ungated[job.step.session] = None


_gate = attrgetter("gate")

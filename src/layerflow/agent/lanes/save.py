"""The save lane: a long-lived thread that copies batches from engine memory to the arena, without the GIL.

A lane survives whatever a batch does: the batch fails, the lane goes on. Where the lane itself fails, the attachment
ends, which gives every step's saves up, and the lane begins anew with what is queued.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from layerflow.agent.lanes.task import (
    CopyTask,
    Lost,
    Report,
    can_coalesce,
    capture_failure,
    copy_coalesced,
    extents_of,
    take_coalescible,
    trace,
)
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import CANCELLED, SAVE
from layerflow.device.base import DeviceEvent
from layerflow.device.timing import use_precise_timers
from layerflow.flow.window import BatchCaps
from layerflow.ops.copier import CpuCopier
from layerflow.system.threads import OwnedThread


class SaveLane:
    """Engine memory to arena, each batch once its layer is computed.

    The engine's thread only stores a word; this thread samples it, so that compute never pays for waking another
    thread. Each save costs the interpreter some time, which the engine's thread needs for the next layer: where layers
    follow each other fast, their saves wait for the end of the forward pass, else small ones leave together. Saves that
    a thread waits for leave at once.

    :param report: called on the lane's thread.
    :param on_reported: called (idle) after some reports. Where the lane is idle, it may be used to pass them on.
    :param lost: told that the lane, or a copier, is broken.

    :ivar caps: what one call copies at most.
    """

    def __init__(self, report: Report, on_reported: Callable[[bool], None], lost: Lost) -> None:
        self.caps = BatchCaps()
        self._tell = report
        self._on_reported = on_reported
        self._lost = lost
        self._unreported_bytes = 0
        self._unreported_since = 0.0
        self._jobs: queue.SimpleQueue[CopyTask | bool] = queue.SimpleQueue()
        self._gated: list[CopyTask] = []
        self._passing: deque[tuple[CopyTask, DeviceEvent | None]] = deque()
        self._interval = SAMPLE_S
        self._open = True
        self._thread = OwnedThread("layerflow-save", self._run, lost=lost, restart_s=RESTART_S).start()

    def put(self, job: CopyTask) -> None:
        """Queue a batch that waits for its layer."""
        self._jobs.put(job)

    def wake(self) -> None:
        """Look at the layers now (the step closed, saves were cancelled)."""
        self._jobs.put(True)

    def close(self) -> None:
        """Drop what waits for layers or passes an emulated link, and stop."""
        self._jobs.put(False)
        self._thread.join()

    def _run(self) -> None:
        use_precise_timers()
        while self._open:
            self._open = self._take()
            if not self._open:
                for job in self._gated:
                    job.step.cancel_saves("agent closed")
            self._interval = SAMPLE_S
            while jobs := self._leaving():
                for job in copy_coalesced(SAVE, jobs, self._report):
                    self._move(job)
                    del job
            self._arrived()
            if self._unreported_bytes and (not self._gated or time.monotonic() - self._unreported_since >= REPORT_S):
                self._let_know(idle=True)

    def _report(self, job: CopyTask, failure: str, event: DeviceEvent | None) -> None:
        self._tell(job, failure, event)
        if not self._unreported_bytes:
            self._unreported_since = time.monotonic()
        if job.step.saves_expedited:  # nothing more of the step is to come, or a thread waits for its saves
            self._unreported_since = 0.0
        self._unreported_bytes += job.batch.nbytes
        if self._unreported_bytes >= REPORT_BYTES:
            self._let_know(idle=False)

    def _let_know(self, idle: bool) -> None:
        self._unreported_bytes = 0
        self._on_reported(idle)

    def _take(self) -> bool:
        """Fetch new jobs; wait for the next moment at which anything can happen."""
        try:
            job = self._jobs.get(timeout=self._poll_timeout_s())
            while True:
                if job is False:
                    return False
                if isinstance(job, CopyTask):
                    self._gated.append(job)
                job = self._jobs.get_nowait()
        except queue.Empty:
            return True

    def _poll_timeout_s(self) -> float | None:
        waits = []
        if self._gated:
            waits.append(self._interval)
        if self._passing:
            waits.append(max(0.0, self._passing[0][0].arrives - time.monotonic()))
        return min(waits) if waits else None

    def _leaving(self) -> list[CopyTask]:
        """Take batches that may leave, and can share a call, out of the gate."""
        ready: dict[Step, list[CopyTask]] = {}
        waiting: set[Step] = set()
        gates: dict[Step, bool | None] = {}
        for job in self._gated:
            step = job.step
            gate = gates[step] if step in gates else gates.setdefault(step, self._gate(job))
            if _is_written(job) if gate is None else gate:
                ready.setdefault(step, []).append(job)
            else:
                waiting.add(step)
        for step, computed in ready.items():
            jobs = take_coalescible(computed, BatchCaps(self.caps.blocks, min(self.caps.nbytes, REPORT_BYTES)))
            if step not in waiting or _is_worth_it(computed):
                self._gated = [job for job in self._gated if job not in jobs]
                return jobs
        return []

    def _gate(self, job: CopyTask) -> bool | None:
        """For all of a step's batches: True = they leave, to be given up; False = they stay; None = once computed."""
        step = job.step
        if step.saves_cancelled:
            return True
        if not isinstance(job.copier, CpuCopier):
            # A device's stream waits for the layer's event by itself; the engine's thread is ahead of its compute.
            self._interval = min(self._interval, SLOW_LINK_SAMPLE_S)
            return None
        layer_s = step.seconds_per_layer(time.monotonic())
        if layer_s < FAST_LAYER_S:
            if step.closed:  # from now on it grows with the clock
                self._interval = min(self._interval, FAST_LAYER_S - layer_s)
            return False
        if job.link.emulated:
            self._interval = min(self._interval, SLOW_LINK_SAMPLE_S)
        return None

    def _move(self, job: CopyTask) -> None:
        batch, step = job.batch, job.step
        done = step.computed(batch.layer)
        if not step.begin(batch):
            self._report(job, CANCELLED, None)
            return
        event, failure = None, "lane stopped"
        job.sent, job.arrives = job.link.send(batch.nbytes)
        try:
            with capture_failure(job, self._lost) as outcome:
                event = job.copier.save(extents_of(job, SAVE, batch.lo, batch.hi), None if done is True else done)
            failure = outcome.failure
        finally:
            failure = step.end(batch, failure, event)
        if failure:
            self._report(job, failure, None)
            return
        if not job.link.emulated:
            job.arrives = time.monotonic()
        self._passing.append((job, event))
        self._arrived()

    def _arrived(self) -> None:
        now = time.monotonic()
        while self._passing and self._passing[0][0].arrives <= now:
            job, event = self._passing.popleft()
            if event is None or job.link.emulated:
                trace(job, "save", job.sent, max(now, job.arrives) if job.link.emulated else job.arrives)
            self._report(job, "", event)


def _is_written(job: CopyTask) -> bool:
    """Is the layer's KV in engine memory, or will the copier wait until it is?"""
    done = job.step.computed(job.batch.layer)
    # On the cpu nothing waits for an event but this lane.
    return done is True or (done is not None and (not isinstance(job.copier, CpuCopier) or done.query()))


def _is_worth_it(jobs: Sequence[CopyTask]) -> bool:
    """Do these leave, although more of their step is to come? What can share no call has nothing to wait for."""
    first = jobs[0]
    if not can_coalesce(first, first) or first.step.saves_expedited:
        return True
    return sum(job.batch.nbytes for job in jobs) >= WORTH_BYTES


SAMPLE_S, SLOW_LINK_SAMPLE_S = 20e-3, 2e-3
"""How often to look at the layers while saves wait for them. Each look, and each call, takes the interpreter from the
engine's thread for some 0.1 ms, and the core too where the system likes it so. A link that is slower than memory has no
time to lose. The end of a forward pass is not sampled."""

RESTART_S = 0.05
"""Before a lane that has failed begins anew."""

WORTH_BYTES = 8 << 20
"""Less than this, under a millisecond of copying, waits for the layers to come."""

REPORT_BYTES, REPORT_S = 16 << 20, 50e-3
"""What was saved is told to the server together, as long as more is to come: each report wakes two threads and the
server. But what is behind the arena is to begin before the last layer is there."""

FAST_LAYER_S = 3e-3
"""Layers faster than this are saved behind the forward pass, once what the engine does with its result is over too; a
save costs the interpreter some 0.1 ms."""

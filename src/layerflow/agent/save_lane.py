"""The save lane: a long-lived thread that copies batches from engine memory to the arena, without the GIL.

A lane survives whatever a batch does: the batch fails, the lane goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from layerflow.agent.jobs import Job, Report, explained, extents_of, joins, together, trace
from layerflow.agent.step import CANCELLED, SAVE
from layerflow.device.base import DeviceEvent
from layerflow.device.timing import use_precise_timers


class SaveLane:
    """Engine memory to arena, each batch once its layer is computed.

    The engine's thread only stores a word; this thread samples it, so that compute never pays for waking another
    thread. Where layers follow each other fast, their saves wait for the end of the forward pass: each costs the
    interpreter some time, which the engine's thread needs for the next layer. Unless somebody waits for the saves.

    :param report: called on the lane's thread.
    :param told: called (idle) after some reports. Where the lane is idle, it may be used to pass them on.
    """

    def __init__(self, report: Report, told: Callable[[bool], None]) -> None:
        self._tell = report
        self._told = told
        self._untold = 0
        self._jobs: queue.SimpleQueue[Job | bool] = queue.SimpleQueue()
        self._gated: list[Job] = []
        self._passing: deque[tuple[Job, DeviceEvent | None]] = deque()
        self._interval = HELD_SAMPLE_S
        self._thread = threading.Thread(target=self._run, name="layerflow-save", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a batch that waits for its layer."""
        self._jobs.put(job)

    def poke(self) -> None:
        """Look at the layers now (the step closed, saves were cancelled)."""
        self._jobs.put(True)

    def close(self) -> None:
        """Drop what waits for layers or passes an emulated link, and stop."""
        self._jobs.put(False)
        self._thread.join()

    def _run(self) -> None:
        use_precise_timers()
        open_ = True
        while open_:
            open_ = self._take()
            if not open_:
                for job in self._gated:
                    job.step.cancel_saves("agent closed")
            self._interval = HELD_SAMPLE_S
            while jobs := self._leaving():
                for job in together(SAVE, jobs, self._report):
                    self._move(job)
                    del job
            self._arrived()
            if self._untold:
                self._let_know(idle=True)

    def _report(self, job: Job, failure: str, event: DeviceEvent | None) -> None:
        self._tell(job, failure, event)
        self._untold += job.batch.nbytes
        if self._untold >= TOLD_BYTES:
            self._let_know(idle=False)

    def _let_know(self, idle: bool) -> None:
        self._untold = 0
        self._told(idle)

    def _take(self) -> bool:
        """Fetch new jobs; wait for the next moment at which anything can happen."""
        try:
            job = self._jobs.get(timeout=self._patience())
            while True:
                if job is False:
                    return False
                if isinstance(job, Job):
                    self._gated.append(job)
                job = self._jobs.get_nowait()
        except queue.Empty:
            return True

    def _patience(self) -> float | None:
        waits = []
        if self._gated:
            waits.append(self._interval)
        if self._passing:
            waits.append(max(0.0, self._passing[0][0].arrives - time.monotonic()))
        return min(waits) if waits else None

    def _leaving(self) -> list[Job]:
        """Take the first batch that may leave out of the gate, and those behind it that can share its call."""
        jobs: list[Job] = []
        nbytes = 0
        for job in self._gated:
            if not self._may_leave(job):
                continue
            if jobs and not joins(job, jobs[0]):
                break
            jobs.append(job)
            nbytes += job.batch.nbytes
            if nbytes >= TOLD_BYTES or not joins(job, job):
                break
        if jobs:
            self._gated = [job for job in self._gated if job not in jobs]
        return jobs

    def _may_leave(self, job: Job) -> bool:
        """Is its layer computed, or is it to be given up?"""
        step = job.step
        if step.saves_cancelled:
            return True
        pace = step.pace(time.monotonic())
        if pace < FAST_LAYER_S:
            if step.closed:  # from now on it grows with the clock
                self._interval = min(self._interval, FAST_LAYER_S - pace)
            return False
        self._interval = min(self._interval, SAMPLE_S)
        return step.computed(job.batch.layer) is not None

    def _move(self, job: Job) -> None:
        batch, step = job.batch, job.step
        done = step.computed(batch.layer)
        if not step.begin(SAVE):
            self._report(job, CANCELLED, None)
            return
        event, failure = None, "lane stopped"
        job.sent, job.arrives = job.link.send(batch.nbytes)
        try:
            with explained(job) as told:
                event = job.copier.save(extents_of(job, SAVE, batch.lo, batch.hi), None if done is True else done)
            failure = told.failure
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
            trace(job, "save", job.sent, max(now, job.arrives) if job.link.emulated else job.arrives)
            self._report(job, "", event)


SAMPLE_S = 2e-3
"""Sampling costs some 1 % of a core; it happens only while saves wait. The end of a forward pass is not sampled."""

HELD_SAMPLE_S = 10e-3
"""The same while no layer is done, or all wait for the end of the pass."""

TOLD_BYTES = 16 << 20
"""Saves behind a forward pass follow each other at once; what is behind the arena can begin with the first of them."""

FAST_LAYER_S = 3e-3
"""Layers faster than this are saved behind the forward pass, once what the engine does with its result is over too; a
save costs the interpreter some 0.1 ms."""

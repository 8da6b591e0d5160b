"""The load lane: a long-lived thread that copies batches from the arena to engine memory, without the GIL.

A lane survives whatever a batch does: the batch fails, the lane goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from layerflow.agent.lanes.task import CopyTask, Report, explained, extents_of, joins, together, trace
from layerflow.agent.step.step import CANCELLED, LOAD
from layerflow.device.timing import sleep_until
from layerflow.wire.messages import BROKEN


class LoadLane:
    """Arena to engine memory, in the order granted.

    :param report: called on the lane's thread.
    :param told: called after some reports.
    """

    def __init__(self, report: Report, told: Callable[[], None]) -> None:
        self._report = report
        self._told = told
        self._seconds_per_byte = 0.0
        self._jobs: queue.SimpleQueue[CopyTask | None] = queue.SimpleQueue()
        self._held: list[CopyTask | None] = []
        self._thread = threading.Thread(target=self._run, name="layerflow-load", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Batches behind the running one."""
        return self._jobs.qsize() + len(self._held)

    def put(self, job: CopyTask) -> None:
        """Queue a batch; an emulated link begins to pass its bytes now."""
        job.sent, job.arrives = job.link.send(job.batch.nbytes)
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued and stop; call once every step is cut off."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._take():
            for job in together(LOAD, jobs, self._report):
                self._move(job)
                del job
            del jobs  # they hold the arena: a dead server's memory would stay until the next batch
            self._told()

    def _take(self) -> list[CopyTask]:
        """The next job and those that can share its call; nothing = stop."""
        first = self._held.pop() if self._held else self._jobs.get()
        if first is None:
            return []
        jobs, nbytes = [first], first.batch.nbytes
        while nbytes < CONVOY_BYTES and joins(first, first):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None or not joins(job, first):
                self._held.append(job)
                break
            jobs.append(job)
            nbytes += job.batch.nbytes
        return jobs

    def _move(self, job: CopyTask) -> None:
        self._pass(job)
        if job.step.begin(LOAD):
            self._copy(job)
        else:
            self._report(job, CANCELLED, None)

    def _pass(self, job: CopyTask) -> None:
        """Wait for the batch's bytes on an emulated link, and for its stagger slot."""
        if job.link.emulated:
            # A link writes bytes as they pass: the copy is timed to end when the last one arrives.
            begin = job.arrives - job.batch.nbytes * self._seconds_per_byte - LINK_LEAD_S
            if not job.step.cut_off.wait(max(0.0, begin - time.monotonic() - CUT_LEAD_S)):
                sleep_until(begin, LINK_SPIN_US)
        if job.batch.not_before:
            # The slot is kept to the last moment: it is what keeps ranks off each other's link.
            sleep_until(job.batch.not_before)

    def _copy(self, job: CopyTask) -> None:
        batch, step = job.batch, job.step
        began = time.monotonic()
        event, live, failure = None, [(batch.lo, batch.hi)], f"{BROKEN}: lane stopped"
        try:
            with explained(job) as told:
                live = step.live(batch)
                for lo, hi in live:
                    event = job.copier.load(extents_of(job, LOAD, lo, hi), step.after)
                if job.link.emulated:
                    took = (time.monotonic() - began) / batch.nbytes
                    self._seconds_per_byte += (took - self._seconds_per_byte) / 8
                    sleep_until(job.arrives, LINK_SPIN_US)
            failure = told.failure or ("" if live else CANCELLED)
        finally:
            trace(job, "load", job.sent if job.link.emulated else began, time.monotonic())
            failure = step.end(batch, failure, event)
        self._report(job, failure, event)


CONVOY_BYTES = 256 << 20
"""Batches are reported when the call is over. As much as is in flight at once by default."""

LINK_SPIN_US = 50
LINK_LEAD_S = 100e-6
"""What a batch costs besides its copy: building extents, waking up."""

CUT_LEAD_S = 5e-3
"""Until so long before a batch has passed an emulated link, cutting its step off ends the wait for it."""

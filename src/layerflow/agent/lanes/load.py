"""The load lane: a long-lived thread that copies batches from the arena to engine memory, without the GIL.

A lane survives whatever a batch does: the batch fails, the lane goes on. Where the lane itself fails, the attachment
ends, which fails every step that waits for it, and the lane begins anew with what is queued.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable

from layerflow.agent.lanes.planned import PlannedLoads, PlannedQueue
from layerflow.agent.lanes.stagger import Stagger
from layerflow.agent.lanes.task import (
    CopyCaps,
    CopyTask,
    Lost,
    Report,
    explained,
    extents_of,
    one_call,
    together,
    trace,
)
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import CANCELLED, LOAD
from layerflow.device.base import DeviceEvent
from layerflow.device.timing import sleep_until, use_precise_timers
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import BROKEN


class LoadLane:
    """Arena to engine memory, in the order granted; batches that can move overtake those whose gate is closed.

    The engine's thread opens gates by storing how far it is. This thread samples that, and is woken when the engine
    has to wait for a layer.

    :param report: called on the lane's thread.
    :param told: called after some reports.
    :param lost: told that the lane, or a copier, is broken.

    :ivar caps: what one call copies at most.
    :ivar stagger: the slots in which layers begin.
    :ivar planned: what this lane cuts into batches itself.
    """

    def __init__(self, report: Report, told: Callable[[], None], lost: Lost) -> None:
        self.caps = CopyCaps()
        self.stagger = Stagger(0, 1, 0)
        self._tell = report
        self._told = told
        self._lost = lost
        self._untold = 0
        self._untold_since = 0.0
        self._told_few = False
        self._seconds_per_byte = 0.0
        self._jobs: queue.SimpleQueue[CopyTask | PlannedLoads | bool] = queue.SimpleQueue()
        self._waiting: list[CopyTask] = []
        self.planned = PlannedQueue()
        self._closing = False
        self._interval = SAMPLE_S
        self._begun: tuple[Step, int] | None = None
        self._thread = OwnedThread("layerflow-load", self._run, lost=lost, restart_s=RESTART_S).start()

    @property
    def has_few(self) -> bool:
        """Will it soon have nothing to do?"""
        some = itertools.islice(filter(_is_open, self._waiting), FEW_BATCHES + 1)
        return self._jobs.qsize() + sum(1 for _ in some) <= FEW_BATCHES

    def put(self, job: CopyTask) -> None:
        """Queue a batch."""
        if _is_open(job):
            _send(job)
        self._jobs.put(job)

    def plan(self, loads: PlannedLoads) -> None:
        """Begin with a step whose places are known."""
        self._jobs.put(loads)

    def wake(self) -> None:
        """Look at the gates now: the engine waits for a layer, or something was cut off."""
        if self._waiting or self.planned:
            self._jobs.put(True)

    def landed(self, nbytes: int) -> None:
        """A batch that was cut here has ended."""
        if self.planned.landed(nbytes) and not self._thread.current:
            self._jobs.put(True)

    def close(self) -> None:
        """Finish what is queued and stop; call once every step is cut off."""
        self._jobs.put(False)
        self._thread.join()

    def _run(self) -> None:
        use_precise_timers()
        while self._waiting or self.planned or not self._closing:
            self._take()
            while jobs := self._leaving():
                for job in together(LOAD, jobs, self._report):
                    self._move(job)
                    del job
                del jobs  # they hold the arena: a dead server's memory would stay until the next batch
                self._take_more(0.0)
                if self._is_to_be_told():
                    self._let_know()

    def _take(self) -> None:
        """Wait for the next moment at which anything can happen."""
        if self._take_more(self._interval if self._waiting or self.planned else None):
            self._interval = SAMPLE_S
        else:
            self._interval = min(2 * self._interval, LONGEST_SAMPLE_S)
        if self._untold and time.monotonic() - self._untold_since >= TOLD_S:
            self._let_know()

    def _take_more(self, timeout: float | None) -> bool:
        """Fetch what was queued; False if nothing was, within `timeout` seconds (None: wait until something is)."""
        taken = False
        try:
            job = self._jobs.get(timeout != 0.0, timeout)
            while True:
                taken = True
                if isinstance(job, CopyTask):
                    self._waiting.append(job)
                    self._told_few = False
                elif isinstance(job, PlannedLoads):
                    self.planned.add(job)
                elif job is False:
                    self._closing = True
                job = self._jobs.get_nowait()
        except queue.Empty:
            return taken

    def _leaving(self) -> list[CopyTask]:
        """Take the first batch that can move, and those that can share its call."""
        waiting = self._waiting
        if self.planned:
            for task in self.planned.take(self.caps):
                _send(task)
                waiting.append(task)
        jobs = one_call(filter(_is_open, waiting), self.caps, one_layer=self.stagger.on)
        if jobs == waiting[: len(jobs)]:
            del waiting[: len(jobs)]
        else:
            taken = set(jobs)
            self._waiting = [job for job in waiting if job not in taken]
        if jobs:
            self._interval = SAMPLE_S
            if self.stagger.on:
                self._keep_slot(jobs[0])
        return jobs

    def _keep_slot(self, job: CopyTask) -> None:
        """Wait for the slot of the layer that is about to begin."""
        step, layer = job.step, job.batch.layer
        if self._begun == (step, layer):
            return
        self._begun = (step, layer)
        now = time.monotonic()
        # The layers behind this one wait for their slots, too: each has its share of the time that is left.
        begin = self.stagger.begin(layer, now, (step.deadline - now) / (step.num_layers - layer + 1))
        if begin > now and not step.cut_off.wait(max(0.0, begin - now - CUT_LEAD_S)):
            sleep_until(begin)

    def _is_to_be_told(self) -> bool:
        """Is the server to hear now of what has ended? Each report wakes two threads, on cores that compute."""
        if not self._untold:  # of what was cut here, each step's end is told
            return False
        if not self._waiting or self._untold >= TOLD_BYTES:
            return True
        # A server that has more to grant hears of it before this lane runs dry: once, then again behind its answer.
        first = self._waiting[0]
        if self._told_few or first.news is None or first.step.all_granted or not self.has_few:
            return False
        self._told_few = True
        return True

    def _report(self, job: CopyTask, failure: str, event: DeviceEvent | None) -> None:
        self._tell(job, failure, event)
        if job.news is None:
            return
        if not self._untold:
            self._untold_since = time.monotonic()
        self._untold += job.batch.nbytes

    def _let_know(self) -> None:
        self._untold = 0
        self._told()

    def _move(self, job: CopyTask) -> None:
        self._pass(job)
        if job.step.begin(job.batch):
            self._copy(job)
        else:
            self._report(job, CANCELLED, None)

    def _pass(self, job: CopyTask) -> None:
        """Wait for the batch's bytes on an emulated link."""
        if not job.link.emulated:
            return
        if not job.arrives:
            _send(job)
        # A link writes bytes as they pass: the copy is timed to end when the last one arrives.
        begin = job.arrives - job.batch.nbytes * self._seconds_per_byte - LINK_LEAD_S
        if not job.step.cut_off.wait(max(0.0, begin - time.monotonic() - CUT_LEAD_S)):
            sleep_until(begin, LINK_SPIN_US)

    def _copy(self, job: CopyTask) -> None:
        batch, step = job.batch, job.step
        began = time.monotonic()
        event, live, failure = None, [(batch.lo, batch.hi)], f"{BROKEN}: lane stopped"
        try:
            with explained(job, self._lost) as told:
                step.fail_replaced()
                live = step.live(batch)
                for lo, hi in live:
                    event = job.copier.load(extents_of(job, LOAD, lo, hi), step.after)
                if event is None:
                    step.fail_replaced()
                if job.link.emulated:
                    took = (time.monotonic() - began) / batch.nbytes
                    self._seconds_per_byte += (took - self._seconds_per_byte) / 8
                    sleep_until(job.arrives, LINK_SPIN_US)
            failure = told.failure or ("" if live else CANCELLED)
        finally:
            if event is None or job.link.emulated:
                trace(job, "load", job.sent if job.link.emulated else began, time.monotonic())
            else:  # the device moves it from now on, and its event tells until when
                job.sent = began
            failure = step.end(batch, failure, event)
        self._report(job, failure, event)


def _is_open(job: CopyTask) -> bool:
    """Can it move? What was cut off leaves at once, to be given up."""
    return job.batch.gate <= job.step.frontier or job.step.fenced


def _send(job: CopyTask) -> None:
    job.sent, job.arrives = job.link.send(job.batch.nbytes)


FEW_BATCHES = 2

RESTART_S = 0.05
"""Before a lane that has failed begins anew."""

SAMPLE_S, LONGEST_SAMPLE_S = 0.25e-3, 4e-3
"""How often to look whether the engine has opened a gate; less and less often while it opens none."""

TOLD_BYTES, TOLD_S = 64 << 20, 50e-3
"""What has ended is told at once where nothing else waits; else when it is so much, or so long ago."""

LINK_SPIN_US = 50
LINK_LEAD_S = 100e-6
"""What a batch costs besides its copy: building extents, waking up."""

CUT_LEAD_S = 5e-3
"""Until so long before a batch has passed an emulated link, cutting its step off ends the wait for it."""

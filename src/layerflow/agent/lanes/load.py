"""The load lane: a long-lived thread that copies batches from the arena to engine memory, without the GIL.

A lane survives whatever a batch does: the batch fails, the lane goes on. Where the lane itself fails, the attachment
ends, which fails every step that waits for it, and the lane begins anew with what is queued.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from layerflow.agent.lanes.task import (
    CopyTask,
    EmulatedLink,
    Lost,
    Report,
    capture_failure,
    copy_coalesced,
    extents_of,
    take_coalescible,
    trace,
)
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import CANCELLED, LOAD
from layerflow.device.base import DeviceEvent
from layerflow.device.timing import sleep_until, use_precise_timers
from layerflow.flow.window import (
    BatchCaps,
    LayerBatch,
    LayerCursor,
    PlannedLayer,
    Sampling,
    Stagger,
    Window,
    WindowCaps,
)
from layerflow.ops.base import Copier
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import BROKEN, Batch, LostBlocks

# Loads whose places the agent knows from the hit: cut into batches here, as the load lane gets to them.
#
# The server grants nothing of them. Its caps hold all the same: a batch carries no more than one may, nothing moves
# further ahead of the engine than ``prefetch_layers``, and what is on its way is within the worker's window.


class WorkerDrivenLoads:
    """One step's. The load lane cuts, any thread ends.

    :param layers: with something to load, in the order in which they are computed.
    :param blocks: how many, by group.
    :param copier: from the arena that holds the objects.
    :param over: told once nothing of the loads moves any more.

    :ivar moved: bytes in place.
    :ivar lost: what has failed but by being cut off.
    """

    def __init__(
        self,
        step: Step,
        layers: Sequence[PlannedLayer],
        blocks: Mapping[int, int],
        *,
        copier: Copier,
        link: EmulatedLink,
        over: Callable[[WorkerDrivenLoads], None],
    ) -> None:
        self.step = step
        self.cursor = LayerCursor(layers, blocks)
        self.moved = 0
        self.lost: list[LostBlocks] = []
        self._copier = copier
        self._link = link
        self._over = over
        self._number = self._ended_batches = 0
        self._ended = False
        self._lock = threading.Lock()

    @property
    def frontier(self) -> int:
        """The layer whose attention has begun."""
        return self.step.frontier

    @property
    def deadline(self) -> float:
        """The step's, in monotonic seconds."""
        return self.step.deadline

    @property
    def left(self) -> bool:
        """Is there a batch to cut? Of what was cut off, none."""
        return not self.cursor.exhausted and not self.step.fenced

    def tasks(self, cut: Sequence[LayerBatch]) -> list[CopyTask]:
        """The copies of batches that were cut."""
        number, batches = self.step.number, []
        for layer, (lo, hi, byte_lo, byte_hi, nbytes), seals in cut:
            self._number += 1
            batches.append(Batch(number, self._number, LOAD, layer, lo, hi, byte_lo, byte_hi, nbytes, -1, seals))
        self.step.grant(batches)
        step, copier, link, ended = self.step, self._copier, self._link, self.ended
        return [CopyTask(batch, step, copier, link, None, ended=ended) for batch in batches]

    def finish_if_done(self) -> None:
        """Say that it is over, where it is: nothing is left and nothing moves. Once."""
        with self._lock:
            # First whether something is left: whoever sees that nothing is sees all batches counted.
            if self._ended or self.left or self._ended_batches < self.cursor.batches:
                return
            self._ended = True
        self._over(self)

    def ended(self, task: CopyTask, failure: str) -> None:
        """A batch has ended; "" = its bytes are in place."""
        batch = task.batch
        with self._lock:
            self._ended_batches += 1
            if not failure:
                self.moved += batch.nbytes
            elif not failure.startswith(CANCELLED):
                self.lost.append(LostBlocks(self.step.group_of(batch.layer), batch.lo, batch.hi, failure))
        self.finish_if_done()


class WorkerDrivenQueue:
    """The window of all steps with planned loads; the load lane's alone, but for :meth:`landed`."""

    def __init__(self, caps: WindowCaps = WindowCaps()) -> None:  # noqa: B008 - a value
        self._window = Window[WorkerDrivenLoads](caps)
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._window)

    @property
    def caps(self) -> WindowCaps:
        """Of what is on its way."""
        return self._window.caps

    @caps.setter
    def caps(self, caps: WindowCaps) -> None:
        self._window.caps = caps

    def add(self, loads: WorkerDrivenLoads) -> None:
        """A step was opened."""
        self._window.add(loads)

    def landed(self, nbytes: int) -> bool:
        """A batch has ended, on whatever thread; does anything wait for its room?"""
        with self._lock:
            self._window.landed(nbytes)
        return bool(self._window)

    def take(self, caps: BatchCaps) -> list[CopyTask]:
        """What may move now: the nearest layer first, as far as the window goes.

        :param caps: of one call.
        """
        with self._lock:
            taken, exhausted = self._window.take(caps)
        tasks = [task for loads, cut in taken for task in loads.tasks(cut)]
        for loads in exhausted:
            loads.finish_if_done()
        return tasks


class LoadLane:
    """Arena to engine memory, in the order granted; batches that can move overtake those whose gate is closed.

    The engine's thread opens gates by storing how far it is. This thread samples that, and is woken when the engine
    has to wait for a layer.

    :param report: called on the lane's thread.
    :param on_reported: called after some reports.
    :param lost: told that the lane, or a copier, is broken.

    :ivar caps: what one call copies at most.
    :ivar stagger: the slots in which layers begin.
    :ivar planned: what this lane cuts into batches itself.
    """

    def __init__(self, report: Report, on_reported: Callable[[], None], lost: Lost) -> None:
        self.caps = BatchCaps()
        self.stagger = Stagger(0, 1, 0)
        self._tell = report
        self._on_reported = on_reported
        self._lost = lost
        self._unreported_bytes = 0
        self._unreported_since = 0.0
        self._reported_nearly_empty = False
        self._seconds_per_byte = 0.0
        self._jobs: queue.SimpleQueue[CopyTask | WorkerDrivenLoads | bool] = queue.SimpleQueue()
        self._waiting: list[CopyTask] = []
        self.planned = WorkerDrivenQueue()
        self._closing = False
        self._sampling = Sampling()
        self._begun: tuple[Step, int] | None = None
        self._thread = OwnedThread("layerflow-load", self._run, lost=lost, restart_s=RESTART_S).start()

    @property
    def is_nearly_empty(self) -> bool:
        """Will it soon have nothing to do?"""
        some = itertools.islice(filter(_is_open, self._waiting), FEW_BATCHES + 1)
        return self._jobs.qsize() + sum(1 for _ in some) <= FEW_BATCHES

    def put(self, job: CopyTask) -> None:
        """Queue a batch."""
        if _is_open(job):
            _send(job)
        self._jobs.put(job)

    def plan(self, loads: WorkerDrivenLoads) -> None:
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
                for job in copy_coalesced(LOAD, jobs, self._report):
                    self._move(job)
                    del job
                del jobs  # they hold the arena: a dead server's memory would stay until the next batch
                self._take_more(0.0)
                if self._is_to_be_told():
                    self._let_know()

    def _take(self) -> None:
        """Wait for the next moment at which anything can happen."""
        if self._take_more(self._sampling.interval if self._waiting or self.planned else None):
            self._sampling.moved()
        else:
            self._sampling.missed()
        if self._unreported_bytes and time.monotonic() - self._unreported_since >= REPORT_S:
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
                    self._reported_nearly_empty = False
                elif isinstance(job, WorkerDrivenLoads):
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
        jobs = take_coalescible(filter(_is_open, waiting), self.caps, one_layer=self.stagger.on)
        if jobs == waiting[: len(jobs)]:
            del waiting[: len(jobs)]
        else:
            taken = set(jobs)
            self._waiting = [job for job in waiting if job not in taken]
        if jobs:
            self._sampling.moved()
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
        if begin > now and not step.loads_stopped.wait(max(0.0, begin - now - CUT_LEAD_S)):
            sleep_until(begin)

    def _is_to_be_told(self) -> bool:
        """Is the server to hear now of what has ended? Each report wakes two threads, on cores that compute."""
        if not self._unreported_bytes:  # of what was cut here, each step's end is told
            return False
        if not self._waiting or self._unreported_bytes >= REPORT_BYTES:
            return True
        # Report early, once, when few batches are left and the server has more to grant: the lane is not to idle.
        first = self._waiting[0]
        if self._reported_nearly_empty or first.report is None or first.step.all_granted or not self.is_nearly_empty:
            return False
        self._reported_nearly_empty = True
        return True

    def _report(self, job: CopyTask, failure: str, event: DeviceEvent | None) -> None:
        self._tell(job, failure, event)
        if job.report is None:
            return
        if not self._unreported_bytes:
            self._unreported_since = time.monotonic()
        self._unreported_bytes += job.batch.nbytes

    def _let_know(self) -> None:
        self._unreported_bytes = 0
        self._on_reported()

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
        if not job.step.loads_stopped.wait(max(0.0, begin - time.monotonic() - CUT_LEAD_S)):
            sleep_until(begin, LINK_SPIN_US)

    def _copy(self, job: CopyTask) -> None:
        batch, step = job.batch, job.step
        began = time.monotonic()
        event, live, failure = None, [(batch.lo, batch.hi)], f"{BROKEN}: lane stopped"
        try:
            with capture_failure(job, self._lost) as outcome:
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
            failure = outcome.failure or ("" if live else CANCELLED)
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

REPORT_BYTES, REPORT_S = 64 << 20, 50e-3
"""What has ended is told at once where nothing else waits; else when it is so much, or so long ago."""

LINK_SPIN_US = 50
LINK_LEAD_S = 100e-6
"""What a batch costs besides its copy: building extents, waking up."""

CUT_LEAD_S = 5e-3
"""Until so long before a batch has passed an emulated link, cutting its step off ends the wait for it."""

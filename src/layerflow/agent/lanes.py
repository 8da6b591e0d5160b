"""Copy lanes: long-lived threads, one batch after the other, each batch one GIL-free call.

A lane survives whatever a batch does: the batch fails, the lane goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import structlog

from layerflow.agent.emulated import EmulatedLink
from layerflow.agent.link import News
from layerflow.agent.step import CANCELLED, LOAD, SAVE, Step
from layerflow.device.base import DeviceEvent
from layerflow.device.timing import sleep_until, use_precise_timers
from layerflow.errors import DeadlineExceeded
from layerflow.observe.trace import Span
from layerflow.ops.copier import Copier
from layerflow.ops.extents import Extents
from layerflow.wire.messages import BROKEN, Batch

log = structlog.get_logger("layerflow.agent.lanes")


@dataclass(slots=True)
class Job:
    """A batch on its way through a lane.

    :param news: where its end is reported: to the server that granted it, and no other.
    :param sent: when its bytes began to pass the emulated link (loads: reserved when granted).
    :param arrives: when the last of them has passed.
    """

    batch: Batch
    step: Step
    copier: Copier
    link: EmulatedLink
    news: News
    sent: float = 0.0
    arrives: float = 0.0


Report = Callable[[Job, str, DeviceEvent | None], None]
"""Told of every job's end: the failure ("" = none), and on a device the event behind the copy."""


class LoadLane:
    """Arena to engine memory, in the order granted.

    :param report: called on the lane's thread.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._seconds_per_byte = 0.0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="layerflow-load", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Batches behind the running one."""
        return self._jobs.qsize()

    def put(self, job: Job) -> None:
        """Queue a batch; an emulated link begins to pass its bytes now."""
        job.sent, job.arrives = job.link.send(job.batch.nbytes)
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued and stop; call once every step is cut off."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._pass(job)
            if job.step.begin(LOAD):
                self._copy(job)
            else:
                self._report(job, CANCELLED, None)
            del job  # it holds the arena: a dead server's memory would stay until the next batch

    def _pass(self, job: Job) -> None:
        """Wait for the batch's bytes on an emulated link, and for its stagger slot."""
        if job.link.emulated:
            # A link writes bytes as they pass: the copy is timed to end when the last one arrives.
            begin = job.arrives - job.batch.nbytes * self._seconds_per_byte - LINK_LEAD_S
            if not job.step.cut_off.wait(max(0.0, begin - time.monotonic() - CUT_LEAD_S)):
                sleep_until(begin, LINK_SPIN_US)
        if job.batch.not_before:
            # The slot is kept to the last moment: it is what keeps ranks off each other's link.
            sleep_until(job.batch.not_before)

    def _copy(self, job: Job) -> None:
        batch, step = job.batch, job.step
        began = time.monotonic()
        event, live, failure = None, [(batch.lo, batch.hi)], f"{BROKEN}: lane stopped"
        try:
            with _explained(job) as explained:
                live = step.live(batch)
                for lo, hi in live:
                    event = job.copier.load(_extents(job, LOAD, lo, hi), step.after)
                if job.link.emulated:
                    took = (time.monotonic() - began) / batch.nbytes
                    self._seconds_per_byte += (took - self._seconds_per_byte) / 8
                    sleep_until(job.arrives, LINK_SPIN_US)
            failure = explained.failure or ("" if live else CANCELLED)
        finally:
            _trace(job, "load", job.sent if job.link.emulated else began, time.monotonic())
            failure = step.end(batch, failure, event)
        self._report(job, failure, event)


class SaveLane:
    """Engine memory to arena, each batch once its layer is computed.

    The engine's thread only stores a word; this thread samples it, so that compute never pays for waking another
    thread. Where layers follow each other fast, their saves wait for the end of the forward pass: each costs the
    interpreter some time, which the engine's thread needs for the next layer. Unless somebody waits for the saves.

    :param report: called on the lane's thread.
    :param told: called after some reports, when none follows at once.
    """

    def __init__(self, report: Report, told: Callable[[], None]) -> None:
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
            self._gated = [job for job in self._gated if not self._try(job)]
            self._arrived()
            if self._untold:
                self._let_know()

    def _report(self, job: Job, failure: str, event: DeviceEvent | None) -> None:
        self._tell(job, failure, event)
        self._untold += job.batch.nbytes
        if self._untold >= TOLD_BYTES:
            self._let_know()

    def _let_know(self) -> None:
        self._untold = 0
        self._told()

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

    def _try(self, job: Job) -> bool:
        """Run the job if its layer is computed; True if it has left the gate."""
        batch, step = job.batch, job.step
        done = step.computed(batch.layer)
        if not step.saves_cancelled:
            pace = step.pace(time.monotonic())
            if pace < FAST_LAYER_S:
                if step.closed:  # from now on it grows with the clock
                    self._interval = min(self._interval, FAST_LAYER_S - pace)
                return False
            self._interval = min(self._interval, SAMPLE_S)
            if done is None:
                return False
        if not step.begin(SAVE):
            self._report(job, CANCELLED, None)
            return True
        event, failure = None, "lane stopped"
        job.sent, job.arrives = job.link.send(batch.nbytes)
        try:
            with _explained(job) as explained:
                event = job.copier.save(_extents(job, SAVE, batch.lo, batch.hi), None if done is True else done)
            failure = explained.failure
        finally:
            failure = step.end(batch, failure, event)
        if failure:
            self._report(job, failure, None)
            return True
        if not job.link.emulated:
            job.arrives = time.monotonic()
        self._passing.append((job, event))
        self._arrived()
        return True

    def _arrived(self) -> None:
        now = time.monotonic()
        while self._passing and self._passing[0][0].arrives <= now:
            job, event = self._passing.popleft()
            _trace(job, "save", job.sent, max(now, job.arrives) if job.link.emulated else job.arrives)
            self._report(job, "", event)


LINK_SPIN_US = 50
LINK_LEAD_S = 100e-6
"""What a batch costs besides its copy: building extents, waking up."""

CUT_LEAD_S = 5e-3
"""Until so long before a batch has passed an emulated link, cutting its step off ends the wait for it."""

SAMPLE_S = 2e-3
"""Sampling costs some 1 % of a core; it happens only while saves wait. The end of a forward pass is not sampled."""

HELD_SAMPLE_S = 10e-3
"""The same while no layer is done, or all wait for the end of the pass."""

TOLD_BYTES = 8 << 20
"""Saves behind a forward pass follow each other at once; what is behind the arena can begin with the first of them."""

FAST_LAYER_S = 3e-3
"""Layers faster than this are saved behind the forward pass, once what the engine does with its result is over too; a
save costs the interpreter some 0.1 ms."""


def _extents(job: Job, direction: int, lo: int, hi: int) -> Extents:
    batch, step = job.batch, job.step
    blocks = step.blocks[direction][step.group_of(batch.layer)]
    return blocks.extents(batch.layer, lo, hi, batch.byte_lo, batch.byte_hi)


def _trace(job: Job, lane: Literal["load", "save"], began: float, ended: float) -> None:
    batch = job.batch
    span = Span(lane, batch.layer, began, ended, batch.nbytes, batch.hi - batch.lo, job.link.emulated)
    job.step.trace.spans.append(span)


class _Explained:
    failure = ""


@contextlib.contextmanager
def _explained(job: Job) -> Iterator[_Explained]:
    """Turn what a copy raises into the batch's failure: it must never take the lane with it."""
    explained = _Explained()
    batch = job.batch
    try:
        yield explained
    except DeadlineExceeded as error:  # before anything was copied: nothing is wrong with the objects
        explained.failure = f"{CANCELLED}: {error}"
    except Exception as error:
        explained.failure = f"{BROKEN}: {type(error).__name__}: {error}"
        # Part of it may be enqueued already: nothing may be written once the batch is reported.
        job.copier.drain()
        log.error(
            "batch_copy_failed",
            step=batch.step,
            batch=batch.batch,
            layer=batch.layer,
            lo=batch.lo,
            hi=batch.hi,
            error=explained.failure,
            exc_info=True,
        )

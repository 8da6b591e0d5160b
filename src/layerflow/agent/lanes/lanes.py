"""Both copy threads of a worker: what they keep to, and what becomes of the batches that they have copied."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable

import structlog

from layerflow.agent.lanes.load import LoadLane
from layerflow.agent.lanes.save import SaveLane
from layerflow.agent.lanes.task import CopyTask, EmulatedLink, Lost, trace
from layerflow.agent.link import Link
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.agent.values import AgentCounters
from layerflow.device.base import Device, DeviceEvent
from layerflow.device.poller import Poller
from layerflow.flow.window import BatchCaps, Stagger, WindowCaps
from layerflow.spec import Shard
from layerflow.wire.messages import BROKEN, Failure, Terms

log = structlog.get_logger("layerflow.agent")


class CompletionHandler:
    """Ends batches. Both lanes call :meth:`copied`; on a device the poller's thread does the rest.

    :param poller: of the device; None on the cpu.
    :param ended: told of every batch's end, and why it failed; "" = it has not.
    :param lost: told where the device may still write what has failed.
    """

    def __init__(self, poller: Poller | None, ended: Callable[[CopyTask, str], None], lost: Lost) -> None:
        self._poller = poller
        self._ended = ended
        self._lost = lost
        self._ended_at = [0.0, 0.0]

    def copied(self, job: CopyTask, failure: str, event: DeviceEvent | None) -> None:
        """A lane is done with a batch; on a device `event` is behind its copy."""
        if event is None or self._poller is None:
            self._ended(job, failure)
        else:
            on_error = functools.partial(self._device_failed, event)
            self._poller.watch(event, self._after_batch, job, failure, on_error=on_error)

    def _after_batch(self, job: CopyTask, failure: str) -> None:
        """The device has copied the batch just now, as far as the poller can see: that is when it moved."""
        if not job.link.emulated:
            direction, now = job.batch.direction, time.monotonic()
            began = max(job.sent, self._ended_at[direction])  # one stream copies batch after batch
            trace(job, "load" if direction == LOAD else "save", min(began, now), now)
            self._ended_at[direction] = now
        if job.batch.direction == LOAD:
            job.step.landed(job.batch)
        self._ended(job, failure)

    def _device_failed(self, event: DeviceEvent, error: BaseException, job: CopyTask, failure: str) -> None:
        """The device cannot say whether the batch's bytes arrived: they did not.

        A save's room is another object's once its failure is told, so the device must be through with it. Nobody need
        wait for loads: the engine's stream is behind them, and its blocks are taken back by a wait for their events.
        """
        reason = f"{BROKEN}: {type(error).__name__}: {error}"
        log.error("batch_copy_failed", step=job.batch.step, batch=job.batch.batch, error=reason)
        if job.batch.direction == LOAD:
            job.step.landed(job.batch, reason)
        else:
            try:
                event.synchronize()
            except Exception as broken:
                log.exception("copier_broken", step=job.batch.step, batch=job.batch.batch)
                self._lost(broken)
        self._ended(job, failure or reason)


class UncertainSaves:
    """Saves that are copied while a load that they were computed from may still turn out to have failed. Any thread
    may call.

    One look of the poller may see the end of a save and not yet that of such a load, which it has asked before.

    :param ended: takes a save batch whose step's loads are known so far.
    """

    def __init__(self, ended: Callable[[CopyTask], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._kept: dict[Step, list[CopyTask]] = {}

    def keep(self, job: CopyTask) -> bool:
        """Keep this batch, which was copied just now? False = what it was computed from is in place."""
        with self._lock:
            uncertain = job.step.may_be_spoilt(job.batch.layer)
            if uncertain:
                self._kept.setdefault(job.step, []).append(job)
            return uncertain

    def landed(self, step: Step) -> None:
        """A load batch of the step has ended on the device."""
        if step not in self._kept:
            return
        with self._lock:
            kept = self._kept.pop(step, [])
        for job in kept:
            self._ended(job)


class DoubtfulReads:
    """Saves that were read while the engine may have been overwriting their blocks. Any thread may call.

    They end once the engine has said which blocks it has overwritten; those whose step is spoilt by then have failed.

    :param ended: takes a save batch, and why it failed; "" = it has not.
    """

    def __init__(self, ended: Callable[[CopyTask, str], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._doubting = False
        self._kept: list[CopyTask] = []

    def begin(self) -> None:
        """The engine may overwrite blocks from now on."""
        with self._lock:
            self._doubting = True

    def keep(self, job: CopyTask) -> bool:
        """Keep this batch, which was read just now? False = its bytes are good."""
        with self._lock:
            if self._doubting:
                self._kept.append(job)
            return self._doubting

    def end(self) -> None:
        """The engine has said which blocks it has overwritten."""
        with self._lock:
            self._doubting = False
            kept, self._kept = self._kept, []
        for job in kept:
            self._ended(job, job.step.saves_spoilt)


class Lanes:
    """The load lane, the save lane and, on a device, the thread that asks its events.

    :param loaded: told of a step when one of its load batches has ended.

    :ivar links: by direction: emulated or not, that copies pass.
    :ivar doubtful: save batches that are read already, but perhaps too late.
    """

    def __init__(self, device: Device, link: Link, counters: AgentCounters, loaded: Callable[[Step], None]) -> None:
        self._link = link
        self._counters = counters
        self._loaded = loaded
        self.links = (EmulatedLink(0, 0), EmulatedLink(0, 0))
        self.poller: Poller | None = None
        self.doubtful = DoubtfulReads(self._end_save)
        self._uncertain = UncertainSaves(lambda job: self._ended_batch(job, ""))
        with contextlib.ExitStack() as begun:  # each has a thread
            if device.kind != "cpu":
                self.poller = Poller(device.kind, prepare=device.leave_captures, lost=link.give_up)
                begun.callback(self.poller.close)
            ends = CompletionHandler(
                self.poller,
                lambda *end: self._ended_batch(*end),  # noqa: PLW0108 - tests replace the method
                link.give_up,
            )
            self.load = LoadLane(ends.copied, self._loaded_some, link.give_up)
            begun.callback(self.load.close)
            self.save = SaveLane(ends.copied, self._saved_some, link.give_up)
            begun.pop_all()

    def close(self) -> None:
        """Stop the lanes and the poller."""
        for part in (self.load, self.save, self.poller):
            if part is not None:
                part.close()

    def set_terms(self, terms: Terms, shard: Shard) -> None:
        """What the server wants kept to from now on."""
        caps = BatchCaps(terms.max_transfer_blocks, terms.max_transfer_bytes)
        self.load.caps = self.save.caps = caps
        self.load.planned.caps = WindowCaps(terms.window_bytes, terms.prefetch_layers)
        self.load.stagger = Stagger(shard.tp_rank, shard.tp_size, terms.stagger_us)
        emulated = terms.link_gbps, terms.link_latency_us
        self.links = EmulatedLink(*emulated), EmulatedLink(*emulated)

    def _ended_batch(self, job: CopyTask, failure: str) -> None:
        if job.batch.direction == LOAD:
            self._loaded(job.step)
            self._tell(job, failure)
            self._uncertain.landed(job.step)
        elif failure or job.step.saves_spoilt:
            self._end_save(job, failure or job.step.saves_spoilt)
        elif not (self._uncertain.keep(job) or self.doubtful.keep(job)):
            self._end_save(job, "")

    def _end_save(self, job: CopyTask, failure: str) -> None:
        job.step.reads.ended(job.batch)
        self._tell(job, failure)

    def _tell(self, job: CopyTask, failure: str) -> None:
        batch = job.batch
        if job.report is None:
            assert job.ended is not None
            self._counters.failed_batches += bool(failure)
            self._counters.loaded_bytes += 0 if failure else batch.nbytes
            job.ended(job, failure)
            self.load.landed(batch.nbytes)
            return
        if failure:
            self._counters.failed_batches += 1
            job.report.failed.append(Failure(batch.batch, failure))
        else:
            if batch.direction == LOAD:
                self._counters.loaded_bytes += batch.nbytes
            else:
                self._counters.saved_bytes += batch.nbytes
            job.report.done.append(batch.batch)
        # Lanes that end their batches themselves wake the link once they have several ends to report.
        if failure or (self.poller is not None and (batch.direction == SAVE or self.load.is_nearly_empty)):
            self._link.wake()

    def _loaded_some(self) -> None:
        if self.poller is None:
            self._link.wake()

    def _saved_some(self, idle: bool) -> None:
        if idle:
            self._link.flush()
        else:
            self._link.wake()

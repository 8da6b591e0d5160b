"""A batch as a lane copies it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import structlog

from layerflow.agent.link import ReportBuffer
from layerflow.agent.step.in_flight import CoalescedCopy
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import CANCELLED, LOAD
from layerflow.device.base import DeviceEvent
from layerflow.errors import DeadlineExceeded
from layerflow.flow.window import BatchCaps
from layerflow.observe.trace import Span
from layerflow.ops.base import Copier
from layerflow.ops.copier import CpuCopier
from layerflow.ops.extents import Extents, joined
from layerflow.ops.paged import Int64
from layerflow.wire.messages import BROKEN, Batch


class EmulatedLink:
    """One direction of a link.

    :param gbps: 0 = no emulation, everything arrives at once.
    :param latency_us: added to each batch; batches behind each other overlap it.
    """

    def __init__(self, gbps: float, latency_us: int) -> None:
        self.emulated = gbps > 0
        self._seconds_per_byte = 1 / (gbps * 1e9) if gbps > 0 else 0.0
        self._latency = latency_us / 1e6
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def send(self, nbytes: int) -> tuple[float, float]:
        """Put bytes on the link now: when they begin to pass and when the last one has arrived."""
        now = time.monotonic()
        if not self.emulated:
            return now, now
        with self._lock:
            began = max(now, self._busy_until)
            self._busy_until = began + nbytes * self._seconds_per_byte
            return began, self._busy_until + self._latency


log = structlog.get_logger("layerflow.agent.lanes")


@dataclass(slots=True, eq=False)
class CopyTask:
    """A batch on its way through a lane.

    :param report: where its end is reported: to the server that granted it, and no other; None = that is for `ended`.
    :param sent: when its bytes began to pass the emulated link (loads: reserved when granted).
    :param arrives: when the last of them has passed.
    :param ended: told of its end, with what failed, where no server granted it.
    """

    batch: Batch
    step: Step
    copier: Copier
    link: EmulatedLink
    report: ReportBuffer | None
    sent: float = 0.0
    arrives: float = 0.0
    ended: Callable[[CopyTask, str], None] | None = None


Report = Callable[[CopyTask, str, DeviceEvent | None], None]
"""Told of every job's end: the failure ("" = none), and on a device the event behind the copy."""


def extents_of(job: CopyTask, direction: int, lo: int, hi: int) -> Extents:
    """Blocks `lo` to `hi` of the batch's layer."""
    batch, step = job.batch, job.step
    blocks = step.blocks[direction][step.group_of(batch.layer)]
    return blocks.extents(batch.layer, lo, hi, batch.byte_lo, batch.byte_hi)


def trace(job: CopyTask, lane: Literal["load", "save"], began: float, ended: float) -> None:
    """Note when the batch moved."""
    batch = job.batch
    span = Span(lane, batch.layer, began, ended, batch.nbytes, batch.hi - batch.lo, job.link.emulated)
    job.step.trace.spans.append(span)


def can_coalesce(job: CopyTask, first: CopyTask) -> bool:
    """Can one call copy both? Nothing is waited for in between, and nothing is left on a device."""
    return (
        job.step is first.step
        and job.copier is first.copier
        and isinstance(job.copier, CpuCopier)
        and not job.link.emulated
    )


def take_coalescible(jobs: Iterable[CopyTask], caps: BatchCaps, *, one_layer: bool = False) -> list[CopyTask]:
    """The first batch, and those behind it that can share its call.

    A batch that was granted under larger caps is a call of its own.
    """
    taken: list[CopyTask] = []
    blocks = nbytes = 0
    for job in jobs:
        batch = job.batch
        blocks += batch.hi - batch.lo
        nbytes += batch.nbytes
        if taken and not (
            blocks <= caps.blocks
            and nbytes <= caps.nbytes
            and can_coalesce(job, taken[0])
            and not (one_layer and batch.layer != taken[0].batch.layer)
        ):
            break
        taken.append(job)
        if not can_coalesce(job, job):
            break
    return taken


def copy_coalesced(direction: int, jobs: Sequence[CopyTask], report: Report) -> Sequence[CopyTask]:
    """Copy batches that join each other in one call, and report them. What is left is to be moved one by one."""
    if len(jobs) == 1:
        return jobs
    copy = CoalescedCopy(direction, [job.batch for job in jobs])
    began, copied = time.monotonic(), _copied(jobs[0], copy)
    for job, ended in zip(jobs[:copied], copy.progress.completed_at.tolist(), strict=False):
        trace(job, "load" if direction == LOAD else "save", began, ended)
        began = ended
        report(job, "", None)
    return jobs[copied:]


def _copied(first: CopyTask, copy: CoalescedCopy) -> int:
    """How many of the batches were copied."""
    step, copier, copied = first.step, first.copier, 0
    assert isinstance(copier, CpuCopier)
    if not step.begin_copy(copy):
        return 0
    try:
        if copy.direction == LOAD:
            copied = copier.load_batches(*_ranges(step, copy), copy.progress, step.thread, step.generation_words)
        else:
            copied = copier.save_batches(*_ranges(step, copy), copy.progress, step.thread)
    except Exception:
        log.exception("batches_refused", step=step.number, batches=len(copy.batches))  # one by one it shows which
    finally:
        step.end_copy(copy, copied)
    return copied


def _ranges(step: Step, copy: CoalescedCopy) -> tuple[Extents, Int64]:
    """The extents of all batches, and where each batch ends in them. What layers share is worked out once."""
    lists = step.blocks[copy.direction]

    def likeness(batch: Batch) -> tuple[int, int, int, int, int]:
        # A part of a block is like no other batch.
        group = step.group_of(batch.layer)
        return group, lists[group].shapes[batch.layer], batch.lo, batch.hi, batch.batch if batch.byte_hi else 0

    pieces: list[Extents] = []
    counts: list[int] = []
    for (_, _, lo, hi, part), batches in itertools.groupby(copy.batches, likeness):
        grouped = list(batches)
        blocks = lists[step.group_of(grouped[0].layer)]
        if part:
            extents = blocks.extents(grouped[0].layer, lo, hi, grouped[0].byte_lo, grouped[0].byte_hi)
        else:
            extents = blocks.layers([batch.layer for batch in grouped], lo, hi)
        pieces.append(extents)
        counts += [extents.nbytes.size // len(grouped)] * len(grouped)
    return joined(pieces), np.cumsum(counts, dtype=np.int64)


class CopyError:
    """Why a copy failed; "" = it has not."""

    failure = ""


Lost = Callable[[BaseException], object]
"""Told that what moves an attachment's bytes is broken: the attachment ends, and the agent attaches anew."""


@contextlib.contextmanager
def capture_failure(job: CopyTask, lost: Lost) -> Iterator[CopyError]:
    """Turn what a copy raises into the batch's failure: it must never take the lane with it.

    :param lost: told where not even what was enqueued can be waited for.
    """
    outcome = CopyError()
    batch = job.batch
    try:
        yield outcome
    except DeadlineExceeded as error:  # before anything was copied: nothing is wrong with the objects
        outcome.failure = f"{CANCELLED}: {error}"
    except Exception as error:
        outcome.failure = f"{BROKEN}: {type(error).__name__}: {error}"
        log.error(
            "batch_copy_failed",
            step=batch.step,
            batch=batch.batch,
            layer=batch.layer,
            lo=batch.lo,
            hi=batch.hi,
            error=outcome.failure,
            exc_info=True,
        )
        try:
            # Part of it may be enqueued already: nothing may be written once the batch is reported.
            job.copier.drain()
        except Exception as broken:
            log.exception("copier_broken", step=batch.step, batch=batch.batch)
            lost(broken)

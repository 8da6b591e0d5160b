"""A batch on its way through a lane, and what every lane does with it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import structlog

from layerflow.agent.convoy import Convoy
from layerflow.agent.emulated import EmulatedLink
from layerflow.agent.link import News
from layerflow.agent.step import CANCELLED, LOAD, Step
from layerflow.device.base import DeviceEvent
from layerflow.errors import DeadlineExceeded
from layerflow.observe.trace import Span
from layerflow.ops.copier import Copier, CpuCopier
from layerflow.ops.extents import Extents, joined
from layerflow.ops.paged import Int64
from layerflow.wire.messages import BROKEN, Batch

log = structlog.get_logger("layerflow.agent.lanes")


@dataclass(slots=True, eq=False)
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


def extents_of(job: Job, direction: int, lo: int, hi: int) -> Extents:
    """Blocks `lo` to `hi` of the batch's layer."""
    batch, step = job.batch, job.step
    blocks = step.blocks[direction][step.group_of(batch.layer)]
    return blocks.extents(batch.layer, lo, hi, batch.byte_lo, batch.byte_hi)


def trace(job: Job, lane: Literal["load", "save"], began: float, ended: float) -> None:
    """Note when the batch moved."""
    batch = job.batch
    span = Span(lane, batch.layer, began, ended, batch.nbytes, batch.hi - batch.lo, job.link.emulated)
    job.step.trace.spans.append(span)


def joins(job: Job, first: Job) -> bool:
    """Can one call copy both? Nothing is waited for in between, and nothing is left on a device."""
    return (
        job.step is first.step
        and job.copier is first.copier
        and isinstance(job.copier, CpuCopier)
        and not job.link.emulated
        and not job.batch.not_before
    )


def together(direction: int, jobs: Sequence[Job], report: Report) -> Sequence[Job]:
    """Copy batches that join each other in one call, and report them. What is left is to be moved one by one."""
    if len(jobs) == 1:
        return jobs
    convoy = Convoy(direction, [job.batch for job in jobs])
    began, copied = time.monotonic(), _copied(jobs[0], convoy)
    for job, ended in zip(jobs[:copied], convoy.headway.landed_at.tolist(), strict=False):
        trace(job, "load" if direction == LOAD else "save", began, ended)
        began = ended
        report(job, "", None)
    return jobs[copied:]


def _copied(first: Job, convoy: Convoy) -> int:
    """How many batches of the convoy were copied."""
    step, copier, copied = first.step, first.copier, 0
    assert isinstance(copier, CpuCopier)
    if not step.set_out(convoy):
        return 0
    try:
        call = copier.load_batches if convoy.direction == LOAD else copier.save_batches
        copied = call(*_ranges(step, convoy), convoy.headway, step.thread)
    except Exception:
        log.exception("batches_refused", step=step.number, batches=len(convoy.batches))  # one by one it shows which
    finally:
        step.came_in(convoy, copied)
    return copied


def _ranges(step: Step, convoy: Convoy) -> tuple[Extents, Int64]:
    """The extents of a convoy's batches, and where each batch's end. What layers share is worked out once for them."""
    lists = step.blocks[convoy.direction]
    shapes = next(iter(lists.values())).shapes

    def likeness(batch: Batch) -> tuple[int, int, int, int]:
        # A part of a block is like no other batch.
        return shapes[batch.layer], batch.lo, batch.hi, batch.batch if batch.byte_hi else 0

    pieces: list[Extents] = []
    counts: list[int] = []
    for (_, lo, hi, part), batches in itertools.groupby(convoy.batches, likeness):
        alike = list(batches)
        blocks = lists[step.group_of(alike[0].layer)]
        if part:
            extents = blocks.extents(alike[0].layer, lo, hi, alike[0].byte_lo, alike[0].byte_hi)
        else:
            extents = blocks.layers([batch.layer for batch in alike], lo, hi)
        pieces.append(extents)
        counts += [extents.nbytes.size // len(alike)] * len(alike)
    return joined(pieces), np.cumsum(counts, dtype=np.int64)


class Explained:
    """Why a copy failed; "" = it has not."""

    failure = ""


@contextlib.contextmanager
def explained(job: Job) -> Iterator[Explained]:
    """Turn what a copy raises into the batch's failure: it must never take the lane with it."""
    told = Explained()
    batch = job.batch
    try:
        yield told
    except DeadlineExceeded as error:  # before anything was copied: nothing is wrong with the objects
        told.failure = f"{CANCELLED}: {error}"
    except Exception as error:
        told.failure = f"{BROKEN}: {type(error).__name__}: {error}"
        # Part of it may be enqueued already: nothing may be written once the batch is reported.
        job.copier.drain()
        log.error(
            "batch_copy_failed",
            step=batch.step,
            batch=batch.batch,
            layer=batch.layer,
            lo=batch.lo,
            hi=batch.hi,
            error=told.failure,
            exc_info=True,
        )

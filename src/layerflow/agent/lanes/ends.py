"""When a batch that a lane is done with has its bytes in place: at once, or once the device's event is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from layerflow.agent.lanes.task import CopyTask, trace
from layerflow.agent.step.transfers import LOAD
from layerflow.device.base import DeviceEvent
from layerflow.device.poller import Poller
from layerflow.wire.messages import BROKEN

log = structlog.get_logger("layerflow.agent")


class CopyEnds:
    """Ends batches. Both lanes call :meth:`copied`; on a device the poller's thread does the rest.

    :param poller: of the device; None on the cpu.
    :param ended: told of every batch's end, and why it failed; "" = it has not.
    """

    def __init__(self, poller: Poller | None, ended: Callable[[CopyTask, str], None]) -> None:
        self._poller = poller
        self._ended = ended
        self._landed_at = [0.0, 0.0]

    def copied(self, job: CopyTask, failure: str, event: DeviceEvent | None) -> None:
        """A lane is done with a batch; on a device `event` is behind its copy."""
        if event is None or self._poller is None:
            self._ended(job, failure)
        else:
            self._poller.watch(event, self._landed, job, failure, on_error=self._device_failed)

    def _landed(self, job: CopyTask, failure: str) -> None:
        """The device has copied the batch just now, as far as the poller can see: that is when it moved."""
        if not job.link.emulated:
            direction, now = job.batch.direction, time.monotonic()
            began = max(job.sent, self._landed_at[direction])  # one stream copies batch after batch
            trace(job, "load" if direction == LOAD else "save", min(began, now), now)
            self._landed_at[direction] = now
        if job.batch.direction == LOAD:
            job.step.fail_replaced()
        self._ended(job, failure)

    def _device_failed(self, error: BaseException, job: CopyTask, failure: str) -> None:
        """The device cannot say whether the batch's bytes arrived: they did not."""
        reason = f"{BROKEN}: {type(error).__name__}: {error}"
        log.error("batch_copy_failed", step=job.batch.step, batch=job.batch.batch, error=reason)
        if job.batch.direction == LOAD:
            job.step.load_failed(job.step.group_of(job.batch.layer), job.batch.lo, job.batch.hi, reason)
        self._ended(job, failure or reason)

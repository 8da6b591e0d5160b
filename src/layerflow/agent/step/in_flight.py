"""Batches of one step that may touch engine memory: a lane copies them, or a device was told to."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import structlog

from layerflow.device.base import DeviceEvent
from layerflow.ops.base import CopyProgress
from layerflow.wire.messages import Batch


class CoalescedCopy:
    """Batches that one call copies, in this order. They land one by one; the lane reports all of them after the call.

    A call for each would hand the interpreter to another thread and take it back, which costs both threads time. Where
    there are few cores it also costs the engine its core: the kernel moves a thread next to the one that wakes it.
    """

    def __init__(self, direction: int, batches: Sequence[Batch]) -> None:
        self.direction = direction
        self.batches = batches
        self.progress = CopyProgress(len(batches))
        self._positions: dict[int, list[int]] = {}
        for position, batch in enumerate(batches):
            self._positions.setdefault(batch.layer, []).append(position)

    def landed(self, layer: int) -> int:
        """How many of the layer's batches have their bytes in place."""
        return self.progress.landed(self._positions.get(layer, ()))

    def halt(self) -> None:
        """No further batch begins; the running one ends."""
        self.progress.halt()


log = structlog.get_logger("layerflow.agent")


class InFlight:
    """What has begun and what has ended, by direction. Call it under the condition, which waiting gives up meanwhile.

    :param step: the step's number, for the log.
    :param condition: the step's; notified whenever a batch has ended that somebody may wait for.
    """

    def __init__(self, step: int, condition: threading.Condition) -> None:
        self._step = step
        self._condition = condition
        self._begun = [0, 0]
        self._ended = [0, 0]
        self._enqueued: list[tuple[Batch, DeviceEvent]] = []
        self._coalesced: list[CoalescedCopy | None] = [None, None]

    def begin(self, direction: int) -> None:
        """A lane is about to touch engine memory for a batch."""
        self._begun[direction] += 1

    def end(self, batch: Batch, event: DeviceEvent | None) -> None:
        """The lane has finished the batch, or has enqueued its copy; `event` completes when the copy does."""
        self._ended[batch.direction] += 1
        if event is not None:
            self._enqueued.append((batch, event))

    def begin_copy(self, copy: CoalescedCopy) -> None:
        """A lane is about to copy all these batches in one call."""
        self._begun[copy.direction] += len(copy.batches)
        self._coalesced[copy.direction] = copy

    def end_copy(self, copy: CoalescedCopy) -> None:
        """The call has returned; batches that it did not copy may begin again."""
        self._ended[copy.direction] += len(copy.batches)
        self._coalesced[copy.direction] = None

    def copy(self, direction: int) -> CoalescedCopy | None:
        """The batches that are being copied in one call."""
        return self._coalesced[direction]

    def has_begun(self, direction: int) -> bool:
        """Has any?"""
        return self._begun[direction] > 0

    def has_one_ended(self, direction: int) -> bool:
        """Has the first just ended, and no other?"""
        return self._ended[direction] == 1

    def halt(self, direction: int) -> None:
        """Let no further batch of these begin."""
        copy = self._coalesced[direction]
        if copy is not None:
            copy.halt()

    def wait_begun(self, direction: int) -> None:
        """Wait for the batches that have begun before now, and for no later one."""
        begun = self._begun[direction]
        self._condition.wait_for(lambda: self._ended[direction] >= begun)

    def wait_idle(self, direction: int, timeout_s: float | None = None) -> bool:
        """Wait until no batch runs. False after `timeout_s`."""
        return self._condition.wait_for(lambda: self._ended[direction] == self._begun[direction], timeout_s)

    def release(self, directions: Collection[int]) -> list[tuple[Batch, str]]:
        """Wait until nothing that was enqueued so far touches either memory any more.

        :returns: batches that a broken device was moving, each with the reason.
        """
        waited = [(batch, event) for batch, event in self._enqueued if batch.direction in directions]
        self._enqueued = [(batch, event) for batch, event in self._enqueued if batch.direction not in directions]
        failed = []
        for batch, event in waited:
            try:
                event.synchronize()
            except Exception as error:
                log.exception("device_failed", step=self._step, layer=batch.layer)
                failed.append((batch, f"device: {error}"))
        return failed

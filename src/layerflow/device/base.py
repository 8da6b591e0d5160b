"""The contract of a device: what differs between cpu, cuda and npu, and nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """A point in an order of execution. torch's cuda and npu events and :class:`layerflow.device.base.CpuEvent` fit."""

    def query(self) -> bool:
        """Whether everything before the event is done. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Return once everything before the event is done."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do.

    :param streams: copies run on a stream of their own, beside the engine's; False: they run on the calling thread.
    :param events: the engine's stream can record events and wait for them.
    :param pinned: host memory that was not allocated by torch can be pinned, so that copies from and to it overlap
        with compute.
    :param count: devices of this kind that are visible.
    """

    streams: bool
    events: bool
    pinned: bool
    count: int


class CopyCounts(NamedTuple):
    """Copies between the arena and a device. On cpu nothing is counted.

    :param batches: that lanes have enqueued.
    :param calls: of the driver, each of many ranges. With `kernels` about as many as `batches` where nothing is wrong.
    :param single: copies of one range each, where the driver could not copy a batch in one call.
    :param bounced: batches that went through a pinned buffer, because their part of the arena is not pinned (yet);
        one that is larger than the buffer's slots is several calls.
    :param kernels: batches that a kernel on the device copied, without a call of the driver's.
    """

    batches: int = 0
    calls: int = 0
    single: int = 0
    bounced: int = 0
    kernels: int = 0


class CopyCounter:
    """Counts them. Thread-safe."""

    def __init__(self) -> None:
        self._counts = CopyCounts()
        self._lock = threading.Lock()

    def add(self, batches: int = 0, calls: int = 0, single: int = 0, bounced: int = 0, kernels: int = 0) -> None:
        """Count some more."""
        with self._lock:
            more = (batches, calls, single, bounced, kernels)
            self._counts = CopyCounts(*(count + new for count, new in zip(self._counts, more, strict=True)))

    @property
    def counts(self) -> CopyCounts:
        """Since the start."""
        return self._counts


KERNEL_WIDTHS = (512, 4 << 10, 16 << 10)
"""Bytes of the ranges that a kernel is made for, at most; ascending."""


class RangeKernel(Protocol):
    """Copies a list of ranges on the device's cores."""

    def launch(self, listed: torch.Tensor, count: int, width: int) -> None:
        """Enqueue the copies of one list on the calling thread's current stream.

        :param listed: on the device, int64, shape ``(3 * count,)``: addresses of destinations, then of sources, on the
            device or in pinned host memory, multiples of 16; then 8-byte words of each, an even number.
        :param width: one of :data:`KERNEL_WIDTHS`, in bytes; no range is longer.
        """
        ...


class Device(Protocol):
    """One device, seen from the engine's process.

    :ivar kind: ``"cpu"``, ``"cuda"`` or ``"npu"``.
    :ivar copies: what was copied to and from it.
    """

    kind: str
    copies: CopyCounter

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """An event behind everything the calling thread has enqueued on its current stream.

        :param timed: for :meth:`seconds_between`.
        """
        ...

    def seconds_between(self, first: object, last: object) -> float | None:
        """The device's time from one event to another, both recorded with `timed` and done; None = not known."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Order everything the calling thread enqueues from now on behind `event`.

        On cuda and npu the thread itself does not wait; `event` must have been recorded.
        """
        ...

    def prepare(self) -> None:
        """Make what speeds copies up and takes seconds, once: the kernel of a cuda device. Not on the engine's thread.

        Copies go on without it. Where it cannot be made, that is logged.
        """
        ...

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin host memory for transfers; whether that was possible.

        Each pin is undone by one :meth:`unpin`, before the memory is unmapped.

        :raises Unsupported: the driver refused.
        """
        ...

    def unpin(self, address: int) -> None:
        """Undo one :meth:`pin`. An address that was not pinned is ignored."""
        ...

    def leave_captures(self) -> None:
        """From now on no call of this thread disturbs a graph that another thread captures."""
        ...

    def capturing(self) -> bool:
        """Does a stream of this process capture a graph now, as far as can be seen from any thread?"""
        ...

    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...


# The cpu: no streams, no device events; a copy is done when its call returns.


class CpuEvent:
    """An event that a thread sets: torch's cpu event cannot record.

    :param done: born set.
    """

    __slots__ = ("_done",)

    def __init__(self, done: bool = False) -> None:
        self._done = threading.Event()
        if done:
            self._done.set()

    def set(self) -> None:
        """Everything before the event is done."""
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


class CpuDevice:
    """Compute and copies happen where they are called, so the present is always recorded."""

    kind = "cpu"

    def __init__(self) -> None:
        self.copies = CopyCounter()

    def record(self, *, timed: bool = False) -> CpuEvent:
        """What the calling thread computed is done: an event that is set."""
        return CpuEvent(done=True)

    def seconds_between(self, first: object, last: object) -> None:
        """Return None: the cpu's events know no time."""

    def wait(self, event: DeviceEvent) -> None:
        """Block until `event` is set."""
        event.synchronize()

    def prepare(self) -> None:
        """There is nothing to make."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Nothing to pin for: False."""
        return False

    def unpin(self, address: int) -> None:
        """Nothing was pinned."""

    def leave_captures(self) -> None:
        """There are no graphs."""

    def capturing(self) -> bool:
        return False

    def capabilities(self) -> Capabilities:
        return Capabilities(streams=False, events=False, pinned=False, count=1)

"""The contract of a device: what differs between cpu, cuda and npu, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class DeviceEvent(Protocol):
    """A point in an order of execution. torch's cuda and npu events and :class:`layerflow.device.cpu.CpuEvent` fit."""

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


class Device(Protocol):
    """One device, seen from the engine's process.

    :ivar kind: ``"cpu"``, ``"cuda"`` or ``"npu"``.
    """

    kind: str

    def record(self) -> DeviceEvent:
        """An event behind everything the calling thread has enqueued on its current stream."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Order everything the calling thread enqueues from now on behind `event`.

        On cuda and npu the thread itself does not wait; `event` must have been recorded.
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

    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

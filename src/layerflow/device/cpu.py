"""The cpu: no streams, no device events; a copy is done when its call returns."""

from __future__ import annotations

import threading

from layerflow.device.base import Capabilities, CopyCounter, DeviceEvent


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
        """Its events know no time."""

    def wait(self, event: DeviceEvent) -> None:
        """Block until `event` is set."""
        event.synchronize()

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

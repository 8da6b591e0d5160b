"""What a copier of any device is, and what it reads and reports: the arena's mapping, the progress of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from layerflow.device.base import DeviceEvent
from layerflow.ops.extents import Extents


def _load_acquire() -> Callable[[], None]:
    try:
        from layerflow.ops._copy import acquire  # noqa: PLC0415 - optional: installed without a compiler
    except ImportError:
        return lambda: None  # the fallback copies under the interpreter's lock, which orders the reads
    return acquire


acquire = _load_acquire()
"""What is read from now on is no older than what was read before; see the C extension."""


class CopyProgress:
    """How far one call that copies several batches has come. Any thread may read the progress or stop the call.

    :ivar completed_at: float64, shape ``(batches,)``: monotonic seconds when a batch was in place; 0.0 = not yet.
    :ivar halted: uint8, shape ``(1,)``: not 0 once :meth:`halt` was called.
    """

    __slots__ = ("completed_at", "halted")

    def __init__(self, batches: int) -> None:
        self.completed_at = np.zeros(batches)
        self.halted = np.zeros(1, np.uint8)

    def landed(self, positions: Iterable[int]) -> int:
        """How many of these batches have their bytes in place, for the calling thread to read."""
        count = sum(1 for position in positions if self.completed_at[position] > 0.0)
        acquire()
        return count

    def halt(self) -> None:
        """Begin no further batch."""
        self.halted[0] = 1


class MappedArena(Protocol):
    """The arena as this process maps it, e.g. :class:`layerflow.system.memfd.SharedMemory`."""

    @property
    def address(self) -> int:
        """The region's first byte."""
        ...

    @property
    def nbytes(self) -> int:
        """The region's length in bytes."""
        ...

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8, shape ``(nbytes,)``, writable."""
        ...


class PinnedPart(Protocol):
    """What of an arena is pinned: from its start, in pieces of one size. A driver takes a range within one piece only.

    :ivar piece_bytes: of every piece but the last.
    """

    piece_bytes: int

    @property
    def pinned_bytes(self) -> int:
        """How far, from its start, the arena is pinned. Only grows, until nothing is copied any more."""
        ...


class Copier(Protocol):
    """Moves batches for one lane; not shared between threads. Destination and source never overlap.

    :ivar way: how a device moves scattered blocks, from the next batch on: ``"ranges"``: each is a range of one call;
        ``"kernel"``: the device's cores copy them, see :mod:`layerflow.ops.kernel`; anything else: whichever pays. The
        cpu has one way.
    """

    way: str

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent | None:
        """Copy from the arena to engine memory.

        :param after: what the engine must have done first with the blocks that are written (record it when the
            step opens); None = it is done with them.
        :returns: None: every byte is in place. An event: the copy is enqueued on this copier's stream and the
            event is recorded behind it; the extents' arena ranges stay pinned until it is done.
        :raises InvalidTransition: on cpu, where nothing is enqueued, if `after` is not done yet.
        """
        ...

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent | None:
        """Copy from engine memory to the arena; as :meth:`load`, `after` being the event behind the bytes' writer."""
        ...

    def drain(self) -> None:
        """Return once nothing that was enqueued here touches either memory any more."""
        ...

    def close(self) -> None:
        """Drain, and give back what was taken for it. Nothing is copied any more."""
        ...

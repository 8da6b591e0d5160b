"""Moving one batch of extents between the arena and engine memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from layerflow.device.base import DeviceEvent
from layerflow.errors import InvalidTransition
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, PagedMemory

CopyCall = Callable[[int, int, Int64, Int64, Int64], None]
CopyBatches = Callable[[int, int, Int64, Int64, Int64, Int64, npt.NDArray[np.float64], npt.NDArray[np.uint8], int], int]


def _load_native() -> tuple[CopyCall | None, CopyBatches | None]:
    try:
        # Optional: no compiler where layerflow was installed.
        from layerflow.ops._copy import copy, copy_batches  # noqa: PLC0415
    except ImportError:
        return None, None
    return copy, copy_batches


def _load_acquire() -> Callable[[], None]:
    try:
        from layerflow.ops._copy import acquire  # noqa: PLC0415 - as above
    except ImportError:
        return lambda: None  # batches land under the interpreter's lock, which orders what is read
    return acquire


copy_native, copy_batches_native = _load_native()
_acquire = _load_acquire()


class CopyProgress:
    """How far a call has come that copies several batches. Other threads may look, and stop it.

    :ivar landed_at: float64, shape ``(batches,)``: monotonic seconds at which a batch's bytes were in place; 0.0 = not
        yet.
    :ivar halted: uint8, shape ``(1,)``: not 0 once :meth:`halt` was called.
    """

    __slots__ = ("completed_at", "halted")

    def __init__(self, batches: int) -> None:
        self.completed_at = np.zeros(batches)
        self.halted = np.zeros(1, np.uint8)

    def landed(self, positions: Iterable[int]) -> int:
        """How many of these batches have their bytes in place, for the calling thread to read."""
        count = sum(1 for position in positions if self.completed_at[position] > 0.0)
        _acquire()
        return count

    def halt(self) -> None:
        """Begin no further batch."""
        self.halted[0] = 1


class MappedArena(Protocol):
    """The arena as this process maps it, e.g. :class:`layerflow.memfd.SharedMemory`."""

    @property
    def address(self) -> int:
        """Its first byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length."""
        ...

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8, shape ``(nbytes,)``, writable."""
        ...


class Copier(Protocol):
    """Moves batches for one lane; not shared between threads. Destination and source never overlap."""

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


def copy_fallback(dst_base: int, src_base: int, dst: Int64, src: Int64, nbytes: Int64) -> None:
    """What the C extension's ``copy`` does, one extent at a time: slower, and holding the GIL in between."""
    for to, at, size in zip((dst + dst_base).tolist(), (src + src_base).tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(to, at, size)


def copy_batches_fallback(
    dst_base: int,
    src_base: int,
    dst: Int64,
    src: Int64,
    nbytes: Int64,
    ends: Int64,
    landed: npt.NDArray[np.float64],
    halt: npt.NDArray[np.uint8],
    beside: int = 0,
) -> int:
    """What the C extension's ``copy_batches`` does, as :func:`copy_fallback`."""
    at = 0
    for batch, end in enumerate(ends.tolist()):
        if halt[0]:
            return batch
        copy_fallback(dst_base, src_base, dst[at:end], src[at:end], nbytes[at:end])
        at, landed[batch] = end, time.monotonic()
    return len(ends)


class CpuCopier:
    """Copies on the calling thread, without the GIL where the C extension is there.

    :param native: use the C extension; False = the fallback. Default: whether it was built.
    """

    def __init__(self, arena: MappedArena, native: bool = copy_native is not None) -> None:
        self._array = arena.array  # a view: whoever closes the arena, the mapping outlives this copier
        self._base = arena.address
        self._copy = copy_native if native and copy_native is not None else copy_fallback
        self._copy_batches = (
            copy_batches_native if native and copy_batches_native is not None else copy_batches_fallback
        )

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        _must_be_done(after)
        self._copy(0, self._base, extents.engine, extents.arena, extents.nbytes)

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        _must_be_done(after)
        self._copy(self._base, 0, extents.arena, extents.engine, extents.nbytes)

    def load_batches(self, extents: Extents, ends: Int64, progress: CopyProgress, beside: int = 0) -> int:
        """As :meth:`load`, batch after batch in one call: the interpreter is not needed in between.

        :param extents: of all batches, one after the other.
        :param ends: int64, shape ``(batches,)``: how many extents there are up to the end of each.
        :param beside: native id of the thread that waits for the bytes; its core is left to it. 0 = nobody's.
        :returns: how many were copied: all, unless `progress` was halted.
        """
        arena, engine, nbytes, _ = extents
        return self._copy_batches(
            0, self._base, engine, arena, nbytes, ends, progress.completed_at, progress.halted, beside
        )

    def save_batches(self, extents: Extents, ends: Int64, progress: CopyProgress, beside: int = 0) -> int:
        """As :meth:`load_batches`, to the arena."""
        arena, engine, nbytes, _ = extents
        return self._copy_batches(
            self._base, 0, arena, engine, nbytes, ends, progress.completed_at, progress.halted, beside
        )

    def drain(self) -> None:
        """Nothing is ever enqueued."""


def copier_for(memory: PagedMemory, arena: MappedArena) -> Copier:
    """A copier for the device that `memory` is on. Each lane takes its own."""
    if memory.device.type == "cpu":
        return CpuCopier(arena)
    from layerflow.ops.streamed import StreamCopier  # noqa: PLC0415 - only where there is a device

    return StreamCopier(memory, arena)


def _must_be_done(after: DeviceEvent | None) -> None:
    if after is not None and not after.query():
        raise InvalidTransition(
            "a cpu copy was submitted before the event it comes after was set; let a poller submit it once the event "
            "is done"
        )

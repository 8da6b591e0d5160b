"""Moving one batch of extents between the arena and engine memory."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import structlog

from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import InvalidTransition
from layerflow.ops.base import Copier, CopyProgress, MappedArena, PinnedPart
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, PagedMemory

log = structlog.get_logger("layerflow.ops")

CopyCall = Callable[[int, int, Int64, Int64, Int64], None]
CopyBatches = Callable[
    [int, int, Int64, Int64, Int64, Int64, npt.NDArray[np.float64], npt.NDArray[np.uint8], int, Int64, Int64], int
]


NO_WORDS: Int64 = np.empty(0, np.int64)


def _load_native() -> tuple[CopyCall | None, CopyBatches | None]:
    try:
        # Optional: no compiler where layerflow was installed.
        from layerflow.ops._copy import copy, copy_batches  # noqa: PLC0415
    except ImportError:
        return None, None
    return copy, copy_batches


copy_native, copy_batches_native = _load_native()


@functools.cache
def warn_of_fallback() -> None:
    """Log once in this process that copies do without the C extension."""
    log.warning("copy_loop_not_built")


def copy_fallback(dst_base: int, src_base: int, dst: Int64, src: Int64, nbytes: Int64) -> None:
    """What the C extension's ``copy`` does, one extent at a time: slower, and holding the GIL in between."""
    for to, at, size in zip((dst + dst_base).tolist(), (src + src_base).tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(to, at, size)


def copy_batches_fallback(  # noqa: PLR0917 - those of the C function, in its order
    dst_base: int,
    src_base: int,
    dst: Int64,
    src: Int64,
    nbytes: Int64,
    ends: Int64,
    landed: npt.NDArray[np.float64],
    halt: npt.NDArray[np.uint8],
    beside: int = 0,
    words_at: Int64 = NO_WORDS,
    words: Int64 = NO_WORDS,
) -> int:
    """What the C extension's ``copy_batches`` does, as :func:`copy_fallback`."""

    def unchanged() -> bool:
        places, said = (words_at + src_base).tolist(), words.tolist()
        return all(ctypes.c_int64.from_address(at).value == word for at, word in zip(places, said, strict=True))

    at = 0
    if not unchanged():
        return 0
    for batch, end in enumerate(ends.tolist()):
        if halt[0]:
            return batch
        copy_fallback(dst_base, src_base, dst[at:end], src[at:end], nbytes[at:end])
        if not unchanged():
            return batch
        at, landed[batch] = end, time.monotonic()
    return len(ends)


class CpuCopier:
    """Copies on the calling thread, without the GIL where the C extension is there.

    :param native: use the C extension; False = the fallback. Default: whether it was built.
    """

    way = "ranges"

    def __init__(self, arena: MappedArena, native: bool = copy_native is not None) -> None:
        self._array = arena.array  # a view: it keeps the mapping when the arena is closed first
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

    def load_batches(
        self,
        extents: Extents,
        ends: Int64,
        progress: CopyProgress,
        beside: int = 0,
        words: tuple[Int64, Int64] = (NO_WORDS, NO_WORDS),
    ) -> int:
        """As :meth:`load`, batch after batch in one call: the interpreter is not needed in between.

        :param extents: of all batches, one after the other.
        :param ends: int64, shape ``(batches,)``: how many extents there are up to the end of each.
        :param beside: native id of the thread that waits for the bytes; its core is left to it. 0 = no thread waits.
        :param words: offsets of words in the arena, and what they must say before the first batch and behind each; see
            :data:`layerflow.objects.GENERATION_AT`.
        :returns: how many were copied: all, unless `progress` was halted or a word has changed.
        """
        arena, engine, nbytes, _ = extents
        return self._copy_batches(
            0, self._base, engine, arena, nbytes, ends, progress.completed_at, progress.halted, beside, *words
        )

    def save_batches(self, extents: Extents, ends: Int64, progress: CopyProgress, beside: int = 0) -> int:
        """As :meth:`load_batches`, to the arena."""
        arena, engine, nbytes, _ = extents
        return self._copy_batches(
            self._base, 0, arena, engine, nbytes, ends, progress.completed_at, progress.halted, beside,
            NO_WORDS, NO_WORDS,
        )  # fmt: skip

    def drain(self) -> None:
        """Nothing is ever enqueued."""

    def close(self) -> None:
        """Nothing is held."""


def copier_for(memory: PagedMemory, arena: MappedArena, device: Device, pinned: PinnedPart | None = None) -> Copier:
    """A copier between the arena and `memory`, which is on `device`. Each lane takes its own, and closes it.

    :param pinned: what of the arena is pinned by now; None = all of it, if its first byte is.
    """
    if copy_native is None:
        warn_of_fallback()
    if device.kind == "cpu":
        return CpuCopier(arena)
    # Only where there is a device.
    from layerflow.device.accelerator import Accelerator  # noqa: PLC0415
    from layerflow.ops.streamed import StreamCopier  # noqa: PLC0415

    assert isinstance(device, Accelerator)
    return StreamCopier(memory, arena, device, copy_native or copy_fallback, pinned)


def _must_be_done(after: DeviceEvent | None) -> None:
    if after is not None and not after.query():
        raise InvalidTransition(
            "a cpu copy was submitted before the event it comes after was set; let a poller submit it once the event "
            "is done"
        )

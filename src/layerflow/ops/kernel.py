"""Many small ranges as one kernel: the device's cores read and write the pinned arena in place.

A copy engine and the driver spend a microsecond and more on each range, however small, and what the engine's thread
launches waits while the driver takes a list of them. A kernel is launched once, and its cost is that of its bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import structlog
import torch

from layerflow.device.accelerator import Accelerator
from layerflow.device.base import KERNEL_WIDTHS, DeviceEvent
from layerflow.errors import Unsupported
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64

log = structlog.get_logger("layerflow.ops")

LIST_SLOTS, LIST_RANGES = 8, 1 << 14
"""Launches that may be under way, and ranges that one takes."""
ALIGNED_BYTES = 16
"""Addresses and lengths are multiples of it, or a batch goes another way."""

# The rule of `auto`, measured on an H200 (docs/benchmarks.md). From 64 KiB on copy engines are as fast, and leave all
# cores to the model. Without a batch call each range is a call of the driver. A launch costs as much as some ranges.
BELOW_BYTES = 64 << 10
BELOW_BYTES_SINGLE = 1 << 20
MIN_RANGES, MIN_RANGES_SINGLE = 32, 8


def cut(dst: Int64, src: Int64, nbytes: Int64, most: int) -> tuple[Int64, Int64, Int64]:
    """The same ranges in pieces of `most` bytes at most, those of one range about equal.

    :param dst: int64, shape ``(n,)``; so are `src` and `nbytes`, which are multiples of :data:`ALIGNED_BYTES`.
    """
    if int(nbytes.max()) <= most:
        return dst, src, nbytes
    parts = -(-nbytes // most)
    piece = -(-nbytes // (parts * ALIGNED_BYTES)) * ALIGNED_BYTES
    inside = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * np.repeat(piece, parts)
    left = np.repeat(nbytes, parts) - inside
    return np.repeat(dst, parts) + inside, np.repeat(src, parts) + inside, np.minimum(left, np.repeat(piece, parts))


class KernelCopies:
    """Of one lane, on its copier's stream.

    :param memory: a tensor of the engine's, on the device; None = it has none.
    :param record: an event behind all that is enqueued on that stream.
    """

    def __init__(self, device: Accelerator, memory: torch.Tensor | None, record: Callable[[], DeviceEvent]) -> None:
        self._device, self._record = device, record
        # Lists on their way to the device, and there.
        self._host: Int64 = np.empty((0, 0), np.int64)
        self._there = torch.empty(0)
        self._events: list[DeviceEvent | None] = [None] * LIST_SLOTS
        self._next = 0
        self._pinned = False
        self._broken = False
        if memory is None or device.kind != "cuda" or device.native is None:
            return
        shape = LIST_SLOTS, LIST_RANGES * 3
        self._host = np.frombuffer(mmap.mmap(-1, LIST_SLOTS * LIST_RANGES * 3 * 8), np.int64).reshape(shape)
        try:
            self._there = torch.empty(shape, dtype=torch.int64, device=memory.device)
            self._pinned = device.pin(int(self._host.ctypes.data), self._host.nbytes)
        except (Unsupported, RuntimeError) as error:  # the latter is torch's out of memory, of any device
            log.warning("copy_kernel_unavailable", device=str(device), reason=str(error))
            self._there = torch.empty(0)

    def takes(self, extents: Extents, arena: int, way: str, *, in_one_call: bool) -> bool:
        """Is the batch, all of whose arena is pinned, one for the kernel?

        :param arena: its address.
        :param way: ``"ranges"``: none is; ``"kernel"``: whatever it can copy; otherwise where it pays.
        :param in_one_call: the driver copies many ranges in one call.
        """
        if way == "ranges" or self._broken or not self._pinned or self._device.kernel is None:
            return False
        count = extents.nbytes.size
        below, least = (BELOW_BYTES, MIN_RANGES) if in_one_call else (BELOW_BYTES_SINGLE, MIN_RANGES_SINGLE)
        if way != "kernel" and (count < least or extents.total >= below * count):
            return False
        return not int(np.bitwise_or.reduce(extents.engine | extents.arena + arena | extents.nbytes)) % ALIGNED_BYTES

    def copy(self, dst: Int64, src: Int64, nbytes: Int64) -> None:
        """Enqueue the copies on the calling thread's current stream, which is the copier's."""
        kernel = self._device.kernel
        assert kernel is not None
        dst, src, nbytes = cut(dst, src, nbytes, KERNEL_WIDTHS[-1])
        longest = int(nbytes.max())
        width = next(each for each in KERNEL_WIDTHS if each >= longest)
        for at in range(0, nbytes.size, LIST_RANGES):
            part = slice(at, at + LIST_RANGES)
            slot, count = self._next, nbytes[part].size
            before = self._events[slot]
            if before is not None:
                before.synchronize()  # LIST_SLOTS launches ago: done, but for a stream that is far behind
            columns = self._host[slot, : 3 * count].reshape(3, count)
            columns[0], columns[1], columns[2] = dst[part], src[part], nbytes[part] // 8
            listed = self._there[slot, : 3 * count]
            listed.copy_(torch.from_numpy(self._host[slot, : 3 * count]), non_blocking=True)
            kernel.launch(listed, count, width)
            self._events[slot] = self._record()
            self._next = (slot + 1) % LIST_SLOTS

    def give_up(self, error: Exception) -> None:
        """It could not be launched: this lane goes without it from now on."""
        self._broken = True
        log.warning("copy_kernel_unavailable", device=str(self._device), reason=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Unpin the lists; nothing is on its way."""
        if self._pinned:
            self._pinned = False
            self._there = torch.empty(0)
            self._device.unpin(int(self._host.ctypes.data))

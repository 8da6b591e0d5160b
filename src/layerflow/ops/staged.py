"""Scattered blocks by way of one contiguous buffer on the device.

A save gathers blocks into the buffer (``index_select``), which leaves for the arena in few large copies; a load's few
large copies fill the buffer, which is scattered into blocks (``index_copy_``). One layer of an object is one range of
the arena, so a batch that is hundreds of ranges block by block is one range for each object.

All of it is enqueued on the copier's stream, whose order lets the buffer be used again and again.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import structlog
import torch

from layerflow.device import is_emulated
from layerflow.device.accelerator import Accelerator
from layerflow.device.base import DeviceEvent
from layerflow.errors import Unsupported
from layerflow.ops.bounced import within_pieces
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, Region

# Byte views of tensors by address, for copies that torch makes one by one.


class ByteViews:
    """Finds the tensor that a range of memory lies in.

    :param tensors: uint8, one-dimensional, contiguous; no two overlap. They are kept alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._starts: list[int] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """One more."""
        at = bisect.bisect_right(self._starts, tensor.data_ptr())
        self._starts.insert(at, tensor.data_ptr())
        self._tensors.insert(at, tensor)

    def of(self, addresses: Int64, nbytes: Int64) -> list[torch.Tensor]:
        """A view of each range, none of which lies across two tensors."""
        views = []
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            number = bisect.bisect_right(self._starts, address) - 1
            at = address - self._starts[number]
            views.append(self._tensors[number][at : at + size])
        return views


log = structlog.get_logger("layerflow.ops")

STAGING_BYTES = 16 << 20
"""Of the buffer that each lane has on the device, from its first staged batch on."""
INDEX_ROWS, INDEX_SLOTS = 1 << 14, 8
"""Rows that one fill of the buffer gathers at most; block tables that a lane remembers on the device."""
MIN_ROW_BYTES = 256
"""Smaller rows cost a kernel more than they save a copy engine."""

# The rule of `auto`. A copy engine is taken to spend a microsecond on a range whatever its size, in which a link moves
# some 16 KiB: below, ranges cost more than their bytes. Without a batch call each range is a call of the driver, taken
# to cost ten. Neither border was measured on a device.
BELOW_BYTES = 16 << 10
BELOW_BYTES_SINGLE = 256 << 10
MIN_GAIN = 4
"""So many times fewer copies, at least."""

Enqueue = Callable[[Int64, Int64, Int64, bool], None]
"""Copies on the copier's stream: destinations, sources, bytes, and whether it is to the device."""


class Rows(NamedTuple):
    """What one fill of the buffer gathers from, or scatters into, one allocation.

    :param region: its position.
    :param phase: bytes before its first row.
    :param row_bytes: a multiple of 8.
    :param rows: int64, shape ``(n,)``: in the order of the buffer.
    :param lo: with `hi`: bytes of the buffer.
    """

    region: int
    phase: int
    row_bytes: int
    rows: Int64
    lo: int
    hi: int


class Fill(NamedTuple):
    """One fill of the buffer: ranges of the arena, each as long as possible, and rows of engine memory.

    :param copies: whose `engine` is the place in the buffer.
    """

    copies: Extents
    rows: tuple[Rows, ...]


def fills_of(extents: Extents, starts: Int64, piece: int, *, most_bytes: int, most_rows: int) -> list[Fill] | None:
    """The fills that move a batch; None where its blocks are no rows of one size, or one does not fit the buffer.

    :param starts: int64, ascending: addresses of the allocations that the blocks lie in.
    :param piece: no copy lies across a multiple of it in the arena.
    :param most_bytes: of one fill; `most_rows` likewise.
    """
    of = starts.searchsorted(extents.engine, side="right") - 1
    order = np.lexsort((extents.arena, of))
    arena, nbytes, of = extents.arena[order], extents.nbytes[order], of[order]
    inside = extents.engine[order] - starts[of]
    row_bytes, phase = np.empty((2, order.size), np.int64)
    borders = [0, *(np.flatnonzero(of[1:] != of[:-1]) + 1).tolist(), order.size]
    for lo, hi in itertools.pairwise(borders):
        first = inside[lo]
        unit = np.gcd.reduce(np.concatenate((nbytes[lo:hi], np.abs(inside[lo:hi] - first))))
        row_bytes[lo:hi], phase[lo:hi] = unit, first % unit
        if unit < MIN_ROW_BYTES or unit % 8 or first % unit % 8:
            return None
    counts = nbytes // row_bytes
    ends, row_ends = np.cumsum(nbytes), np.cumsum(counts)
    fills, begin = [], 0
    while begin < order.size:
        taken, rows_taken = int(ends[begin] - nbytes[begin]), int(row_ends[begin] - counts[begin])
        end = int(
            min(ends.searchsorted(taken + most_bytes, "right"), row_ends.searchsorted(rows_taken + most_rows, "right"))
        )
        if end == begin:
            return None
        part = slice(begin, end)
        places = ends[part] - nbytes[part] - taken
        rows = _rows(of[part], phase[part], row_bytes[part], inside=inside[part], counts=counts[part], places=places)
        fills.append(Fill(_merged(arena[part], places, nbytes[part], piece), rows))
        begin = end
    return fills


def _rows(
    of: Int64, phase: Int64, row_bytes: Int64, *, inside: Int64, counts: Int64, places: Int64
) -> tuple[Rows, ...]:
    borders = [0, *(np.flatnonzero(of[1:] != of[:-1]) + 1).tolist(), of.size]
    found = []
    for lo, hi in itertools.pairwise(borders):
        unit, start, count = int(row_bytes[lo]), int(phase[lo]), counts[lo:hi]
        total = int(count.sum())
        first = (inside[lo:hi] - start) // unit - (np.cumsum(count) - count)
        at = int(places[lo])
        rows = np.repeat(first, count) + np.arange(total, dtype=np.int64)
        found.append(Rows(int(of[lo]), start, unit, rows, at, at + total * unit))
    return tuple(found)


def _merged(arena: Int64, places: Int64, nbytes: Int64, piece: int) -> Extents:
    """Neighbours in the arena as one copy each; the buffer has no gaps."""
    heads = np.flatnonzero(np.concatenate(([True], arena[1:] != arena[:-1] + nbytes[:-1])))
    total = int(nbytes.sum())
    sizes = np.diff(np.append(places[heads], total))
    return within_pieces(Extents(arena[heads], places[heads], sizes, total), arena[heads], piece)


def select_rows(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Enqueue, on the current stream: ``out[i] = source[index[i]]``."""
    torch.index_select(source, 0, index, out=out)


def copy_rows(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue, on the current stream: ``target[index[i]] = source[i]``; no two of the index are equal."""
    target.index_copy_(0, index, source)


class Staging:
    """The buffer of one lane, and the block tables that it remembers.

    :param regions: of the engine's memory.
    :param views: of the device's memory and of the host's; they are told of what is taken here.
    :param enqueue: see :data:`Enqueue`.
    :param record: an event behind all that is enqueued.

    :ivar usable: False: the driver pins no memory, or has none left.
    """

    def __init__(
        self,
        device: Accelerator,
        regions: tuple[Region, ...],
        arena: int,
        *,
        views: tuple[ByteViews, ByteViews],
        enqueue: Enqueue,
        record: Callable[[], DeviceEvent],
    ) -> None:
        self._device, self._regions, self._arena = device, regions, arena
        self._views, host_views = views
        self._enqueue, self._record = enqueue, record
        self._emulated = is_emulated(device.kind)  # no kernel computes there
        self._starts: Int64 = np.array([region.address for region in regions], np.int64)
        # Lists of rows, on their way to the device.
        host = mmap.mmap(-1, INDEX_SLOTS * INDEX_ROWS * 8)
        self._host: Int64 = np.frombuffer(host, np.int64).reshape(INDEX_SLOTS, INDEX_ROWS)
        self._host_address = int(self._host.ctypes.data)
        host_views.add(torch.from_numpy(self._host.reshape(-1).view(np.uint8)))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(INDEX_SLOTS))
        self._uploads: dict[int, DeviceEvent] = {}
        self._buffer: torch.Tensor | None = None
        self._index: torch.Tensor | None = None
        try:
            self.usable = bool(regions) and device.pin(self._host_address, self._host.nbytes)
        except Unsupported as error:
            log.warning("staging_not_pinned", device=str(device), reason=str(error))
            self.usable = False
        self._pinned = self.usable

    def fills(self, extents: Extents, way: str, piece: int, *, in_one_call: bool) -> list[Fill] | None:
        """How to move the batch by way of the buffer; None = block by block.

        :param way: ``"ranges"``, ``"staged"``: wherever possible, or ``"auto"``: where it seems to pay.
        :param in_one_call: the driver copies many ranges in one call.
        """
        count = extents.nbytes.size
        if way == "ranges" or not self.usable or (way == "auto" and self._emulated):
            return None
        below = BELOW_BYTES if in_one_call else BELOW_BYTES_SINGLE
        if way == "auto" and (count < MIN_GAIN or extents.total >= below * count):
            return None
        fills = fills_of(extents, self._starts, piece, most_bytes=STAGING_BYTES, most_rows=INDEX_ROWS)
        if fills is None or (way == "auto" and sum(len(fill.copies.nbytes) for fill in fills) * MIN_GAIN > count):
            return None
        return fills if self._taken() else None

    def load(self, fills: list[Fill]) -> None:
        """Arena, buffer, blocks."""
        buffer, _ = self._memory()
        for fill in fills:
            arena, places, nbytes, _ = fill.copies
            key, slot, new = self._slot(fill)
            dst, src = places + buffer.data_ptr(), arena + self._arena
            if new:
                to, at, size = self._list(slot, fill)
                dst, src, nbytes = np.append(dst, to), np.append(src, at), np.append(nbytes, size)
            self._enqueue(dst, src, nbytes, True)
            if new:
                self._uploaded(key, slot)
            for rows, index in self._indices(fill, slot):
                copy_rows(self._rows(rows), index, self._staged(rows))

    def save(self, fills: list[Fill]) -> None:
        """Blocks, buffer, arena."""
        buffer, _ = self._memory()
        for fill in fills:
            key, slot, new = self._slot(fill)
            if new:
                to, at, size = (np.array([number], np.int64) for number in self._list(slot, fill))
                self._enqueue(to, at, size, True)
                self._uploaded(key, slot)
            for rows, index in self._indices(fill, slot):
                select_rows(self._rows(rows), index, self._staged(rows))
            arena, places, nbytes, _ = fill.copies
            self._enqueue(arena + self._arena, places + buffer.data_ptr(), nbytes, False)

    def close(self) -> None:
        """Unpin, and let the buffer go; nothing is on its way."""
        self.usable = False
        self._buffer = self._index = None
        if self._pinned:
            self._pinned = False
            self._device.unpin(self._host_address)

    def _taken(self) -> bool:
        """Whether there is a buffer now; none is made while the engine captures a graph."""
        if self._buffer is not None:
            return True
        if self._device.capturing():
            return False
        where = self._regions[0].bytes.device
        try:
            self._buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=where)
            self._index = torch.empty((INDEX_SLOTS, INDEX_ROWS), dtype=torch.int64, device=where)
        except RuntimeError as error:  # torch's out of memory, of any device
            log.warning("staging_not_allocated", device=str(self._device), nbytes=STAGING_BYTES, reason=str(error))
            self._buffer, self.usable = None, False
            return False
        self._views.add(self._buffer)
        self._views.add(self._index.view(-1).view(torch.uint8))
        return True

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffer is not None and self._index is not None
        return self._buffer, self._index

    def _slot(self, fill: Fill) -> tuple[bytes, int, bool]:
        """Where the fill's rows are listed on the device; True: they are not yet, and :meth:`_list` has to come."""
        key = b"".join(rows.rows.tobytes() for rows in fill.rows)
        if key in self._slots:
            self._slots.move_to_end(key)
            return key, self._slots[key], False
        # A slot is forgotten before it is written, and taken once it is: a call that fails leaves nothing behind that
        # looks right, and its slot is free.
        if not self._free:
            self._free.append(self._slots.popitem(last=False)[1])
        return key, self._free[-1], True

    def _list(self, slot: int, fill: Fill) -> tuple[int, int, int]:
        """Write the rows where the device reads them: where to, from where, and how many bytes."""
        _, index = self._memory()
        if slot in self._uploads:
            self._uploads[slot].synchronize()  # INDEX_SLOTS block tables ago: done, but for a stream that is far behind
        rows = np.concatenate([rows.rows for rows in fill.rows])
        self._host[slot, : rows.size] = rows
        return index[slot].data_ptr(), self._host_address + slot * INDEX_ROWS * 8, rows.nbytes

    def _uploaded(self, key: bytes, slot: int) -> None:
        self._uploads[slot] = self._record()
        self._free.remove(slot)
        self._slots[key] = slot

    def _indices(self, fill: Fill, slot: int) -> list[tuple[Rows, torch.Tensor]]:
        _, index = self._memory()
        at, found = 0, []
        for rows in fill.rows:
            found.append((rows, index[slot, at : at + rows.rows.size]))
            at += rows.rows.size
        return found

    def _rows(self, rows: Rows) -> torch.Tensor:
        """The allocation, int64, shape ``(rows, row_bytes // 8)``."""
        whole = self._regions[rows.region].bytes[rows.phase :]
        count = whole.numel() // rows.row_bytes
        return whole[: count * rows.row_bytes].view(torch.int64).view(count, rows.row_bytes // 8)

    def _staged(self, rows: Rows) -> torch.Tensor:
        buffer, _ = self._memory()
        return buffer[rows.lo : rows.hi].view(torch.int64).view(-1, rows.row_bytes // 8)

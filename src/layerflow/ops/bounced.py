"""A pinned buffer that batches pass through while their part of the arena is not pinned."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from layerflow.device.accelerator import Accelerator
from layerflow.device.base import DeviceEvent
from layerflow.errors import Unsupported
from layerflow.ops.base import MappedArena
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64

log = structlog.get_logger("layerflow.ops")

SLOT_BYTES, SLOTS = 8 << 20, 4

CopyCall = Callable[[int, int, Int64, Int64, Int64], None]
"""The host's copies; see :func:`layerflow.ops.copier.copy_fallback`."""

Enqueue = Callable[[Int64, Int64, Int64, bool], None]
"""Copies on the copier's stream: destinations, sources, bytes, and whether it is to the device."""


@dataclass(slots=True)
class _Passage:
    """What one slot carries. Saves have bytes to copy on, by the host, once the device's event is done."""

    event: DeviceEvent
    dst: Int64 | None = None
    src: Int64 | None = None
    nbytes: Int64 | None = None
    done: bool = False
    failed: Exception | None = None


class Bounced:
    """The event behind a save through the buffer: done once its bytes are in the arena."""

    def __init__(self, buffer: BounceBuffer, passages: list[_Passage]) -> None:
        self._buffer = buffer
        self._passages = passages

    def query(self) -> bool:
        if not self._passages[-1].event.query():
            return False
        self._copy_out()
        return True

    def synchronize(self) -> None:
        try:
            self._passages[-1].event.synchronize()
        except Exception:
            self._buffer.abandon(self._passages)
            raise
        self._copy_out()

    def _copy_out(self) -> None:
        for passage in self._passages:
            self._buffer.copy_out(passage)


class BounceBuffer:
    """A few slots, taken in turn by one lane; a slot is free again when the device is done with it.

    :param device: that the buffer is pinned for.
    :param slot_bytes: of one slot.

    :ivar usable: False: the driver pins no memory.
    """

    def __init__(
        self,
        device: Accelerator,
        arena: MappedArena,
        copy: CopyCall,
        *,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        self._device = device
        self._arena_bytes = arena.array  # holds the mapping while bytes are on their way
        self._arena = arena.address
        self._slot_bytes = slot_bytes
        self._memory = np.frombuffer(mmap.mmap(-1, slot_bytes * slots), np.uint8)
        self._address = int(self._memory.ctypes.data)
        self._slots = itertools.cycle(range(slots))
        self._in_use: deque[tuple[int, _Passage]] = deque()
        self._copy = copy
        self._lock = threading.Lock()  # a save's bytes are copied on by the poller, or by the lane that needs the slot
        try:
            self.usable = device.pin(self._address, self._memory.nbytes)
        except Unsupported as error:
            log.warning("bounce_buffer_not_pinned", device=str(device), reason=str(error))
            self.usable = False

    def load(self, extents: Extents, enqueue: Enqueue, record: Callable[[], DeviceEvent]) -> DeviceEvent:
        """Arena, buffer, device. :returns: the event behind the last of it."""
        for part in cut(extents, self._slot_bytes):
            slot, places = self._free_slot(part)
            self._copy(slot, self._arena, places, part.arena, part.nbytes)
            enqueue(part.engine, places + slot, part.nbytes, True)
            self._in_use.append((slot, _Passage(record())))
        return self._in_use[-1][1].event

    def save(self, extents: Extents, enqueue: Enqueue, record: Callable[[], DeviceEvent]) -> Bounced:
        """Device, buffer, and, once the event that is returned is asked, the arena."""
        passages: list[_Passage] = []
        try:
            for part in cut(extents, self._slot_bytes):
                slot, places = self._free_slot(part)
                enqueue(places + slot, part.engine, part.nbytes, False)
                passages.append(_Passage(record(), part.arena, places + slot, part.nbytes))
                self._in_use.append((slot, passages[-1]))
        except BaseException:
            self.abandon(passages)  # nobody asks for their end: the place in the arena is another object's by then
            raise
        return Bounced(self, passages)

    def abandon(self, passages: Sequence[_Passage]) -> None:
        """Bytes that have not reached the arena yet go nowhere; their slots are free once the device is done."""
        with self._lock:
            for passage in passages:
                passage.dst = None

    def copy_out(self, passage: _Passage) -> None:
        """Copy a save's bytes on to the arena, once; its event is done."""
        with self._lock:
            if passage.failed is not None:
                raise passage.failed
            if not passage.done and passage.dst is not None and passage.src is not None and passage.nbytes is not None:
                self._copy(self._arena, 0, passage.dst, passage.src, passage.nbytes)
            passage.done = True

    def drain(self) -> None:
        """Everything that the device has done reaches the arena; the copier's stream has nothing left to do."""
        while self._in_use:
            self.copy_out(self._in_use.popleft()[1])

    def close(self) -> None:
        """Unpin it; nothing is on its way."""
        if self.usable:
            self.usable = False
            self._device.unpin(self._address)

    def _free_slot(self, part: Extents) -> tuple[int, Int64]:
        """The address of the next slot, and where in it each range lies."""
        slot = self._address + next(self._slots) * self._slot_bytes
        if any(taken == slot for taken, _ in self._in_use):
            while True:
                taken, passage = self._in_use.popleft()
                try:
                    passage.event.synchronize()
                except Exception as error:
                    passage.failed = error  # its slot is taken from it: its bytes are not to be had any more
                    raise
                self.copy_out(passage)
                if taken == slot:
                    break
        return slot, np.cumsum(part.nbytes) - part.nbytes


def cut(extents: Extents, most: int) -> Iterator[Extents]:
    """The same ranges in parts of at most `most` bytes; larger ranges are split."""
    split = within_pieces(extents, extents.arena * 0, most)
    begin, taken = 0, 0
    ends = np.cumsum(split.nbytes)
    while begin < split.nbytes.size:
        end = int(np.searchsorted(ends, taken + most, side="right"))
        total = int(ends[end - 1]) - taken
        yield Extents(split.arena[begin:end], split.engine[begin:end], split.nbytes[begin:end], total)
        begin, taken = end, taken + total


def within_pieces(extents: Extents, start: Int64, piece: int) -> Extents:
    """The same bytes in ranges of which none lies across a multiple of `piece`.

    :param start: int64, shape ``(n,)``: where each range starts.
    """
    arena, engine, nbytes, total = extents
    first = start // piece
    pieces = np.maximum((start + nbytes - 1) // piece, first) - first + 1
    if not extents.nbytes.size or int(pieces.max()) == 1:
        return extents
    of = np.repeat(np.arange(nbytes.size), pieces)
    nth = np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(start[of], (first[of] + nth) * piece)
    end = np.minimum((start + nbytes)[of], (first[of] + nth + 1) * piece)
    moved = begin - start[of]
    return Extents(arena[of] + moved, engine[of] + moved, end - begin, total)

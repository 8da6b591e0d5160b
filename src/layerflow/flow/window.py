"""What moves ahead of an engine: layers cut into batches, within the caps of a batch, a window and stagger slots.

Pure: no clock, no lock, no thread. The core cuts what it grants with it, a worker's load lane what its plans hold, and
the simulator drives the same lane's window under a virtual clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

# One batch.


class BatchCaps(NamedTuple):
    """What one call moves at most: blocks, each layer's counted, and bytes."""

    blocks: int = 4096
    nbytes: int = 64 << 20


class BatchExtent(NamedTuple):
    """One batch's extent: blocks `lo` to `hi`; bytes `byte_lo` to `byte_hi` of block `lo` where it is split."""

    lo: int
    hi: int
    byte_lo: int
    byte_hi: int
    nbytes: int


class BlockCursor:
    """Where the batches of one layer stand.

    :ivar at: the next block. :ivar byte_at: bytes of it that are cut already. :ivar end: behind the last block.
    """

    __slots__ = ("at", "block_bytes", "byte_at", "end")

    at: int
    block_bytes: int
    byte_at: int
    end: int

    def next_extent(self, max_blocks: int, max_bytes: int) -> BatchExtent:
        """The next batch under the caps; the cursor stays."""
        block_bytes, at = self.block_bytes, self.at
        if self.byte_at or block_bytes > max_bytes:
            byte_hi = min(block_bytes, self.byte_at + max_bytes)
            return BatchExtent(at, at + 1, self.byte_at, byte_hi, byte_hi - self.byte_at)
        blocks = min(self.end - at, max_blocks, max_bytes // block_bytes)
        return BatchExtent(at, at + blocks, 0, 0, blocks * block_bytes)


# One step's planned loads, and the window that all of a worker's steps share.


class PlannedLayer(NamedTuple):
    """A layer: its group, and the bytes of each of its blocks."""

    layer: int
    group: int
    block_bytes: int


class LayerBatch(NamedTuple):
    """A batch of one layer; `seals` says that no later one carries anything of this layer."""

    layer: int
    extent: BatchExtent
    seals: bool


class LayerCursor(BlockCursor):
    """Where the batches of a step stand, layer after layer.

    :param layers: with something to load, in the order in which they are computed; at least one.
    :param blocks: how many, by group.

    :ivar batches: that were cut. The last one is counted before the cursor is exhausted: whoever sees that it is, on
        whatever thread, sees all of them counted.
    """

    __slots__ = ("_blocks", "_index", "_layers", "batches")

    def __init__(self, layers: Sequence[PlannedLayer], blocks: Mapping[int, int]) -> None:
        self._layers, self._blocks = layers, blocks
        self.batches = 0
        self._enter(0)

    def _enter(self, index: int) -> None:
        if index < len(self._layers):
            _, group, self.block_bytes = self._layers[index]
            self.at, self.byte_at, self.end = 0, 0, self._blocks[group]
        self._index = index

    @property
    def exhausted(self) -> bool:
        """Is there nothing left to cut?"""
        return self._index >= len(self._layers)

    @property
    def layer(self) -> int:
        """The next batch's."""
        return self._layers[self._index].layer

    def cut(
        self, caps: BatchCaps, room: int, upto: int, *, batches: int = sys.maxsize, nbytes: int = 0
    ) -> list[LayerBatch]:
        """The next batches.

        :param room: bytes for them, beyond which there is none but the first.
        :param upto: of layers up to this one.
        :param batches: so many are enough, where they carry `nbytes`.
        """
        cut: list[LayerBatch] = []
        while not self.exhausted and (len(cut) < batches or nbytes > 0) and (layer := self.layer) <= upto:
            extent = self.next_extent(*caps)
            if cut and extent.nbytes > room:
                break
            room -= extent.nbytes
            nbytes -= extent.nbytes
            self.batches += 1
            seals = False
            if 0 < extent.byte_hi < self.block_bytes:
                self.byte_at = extent.byte_hi
            elif extent.hi < self.end:
                self.at, self.byte_at = extent.hi, 0
            else:
                seals = True
                self._enter(self._index + 1)
            cut.append(LayerBatch(layer, extent, seals))
        return cut


class WindowCaps(NamedTuple):
    """What may be on its way at once.

    :param nbytes: all steps together; 0 = nothing may.
    :param depth: layers past the one whose attention has begun; 0 = any.
    """

    nbytes: int = 0
    depth: int = 0


class PlannedLoads(Protocol):
    """A step whose loads pass a window."""

    @property
    def cursor(self) -> LayerCursor: ...

    @property
    def frontier(self) -> int:
        """The layer whose attention has begun."""
        ...

    @property
    def deadline(self) -> float:
        """Seconds, by any clock that all steps share."""
        ...

    @property
    def left(self) -> bool:
        """Is there a batch to cut? Of what was cut off, none."""
        ...


LoadsT = TypeVar("LoadsT", bound=PlannedLoads)


class Window(Generic[LoadsT]):
    """What of all steps is on its way: the nearest layer first, as far as the caps go.

    :ivar caps: may change at any time; what is on its way stays.
    :ivar full: the last look has found no room: nothing may move until something lands.
    """

    def __init__(self, caps: WindowCaps = WindowCaps()) -> None:  # noqa: B008 - a value
        self.caps = caps
        self.full = False
        self._steps: list[LoadsT] = []
        self._in_flight = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def moves(self) -> bool:
        """Is anything on its way?"""
        return self._in_flight > 0

    def add(self, loads: LoadsT) -> None:
        """A step was opened."""
        self._steps.append(loads)

    def landed(self, nbytes: int) -> None:
        """A batch that was taken has ended."""
        self._in_flight -= nbytes

    def take(self, caps: BatchCaps) -> tuple[list[tuple[LoadsT, list[LayerBatch]]], list[LoadsT]]:
        """What is to move next, and the steps of which nothing is left to be taken. Ask again once it has left.

        :param caps: of one call.
        """
        window, depth = self.caps
        most, call = max(1, min(caps.nbytes, window)), caps.nbytes
        count = nbytes = 0
        taken: list[tuple[LoadsT, list[LayerBatch]]] = []
        exhausted: list[LoadsT] = []
        while True:
            steps: list[LoadsT] = []
            for each in self._steps:  # asked once: another thread may cut a step off at any time
                (steps if each.left else exhausted).append(each)
            self._steps = steps
            self.full = 0 < window <= self._in_flight
            if self.full or not steps:
                break
            alone = len(self._steps) == 1
            first = self._steps[0] if alone else min(self._steps, key=_distance)
            cursor = first.cursor
            # A device is given the next batches before the first has landed. A block is not cut for that.
            caps = BatchCaps(caps.blocks, min(most, max(window // IN_FLIGHT, cursor.block_bytes)))
            room = window - self._in_flight
            if self._in_flight and cursor.next_extent(*caps).nbytes > room:
                self.full = True
                break
            # Where others wait too, it is their turn again behind this layer; and the first bytes leave at once.
            near, fresh = cursor.layer, not cursor.batches
            upto = sys.maxsize if alone and not fresh else near + FIRST_LAYERS - 1 if alone else near
            upto = min(upto, first.frontier + depth) if depth else upto
            cut = cursor.cut(caps, room, upto, batches=TURN - count, nbytes=call - nbytes)
            cut_bytes = sum([batch.extent.nbytes for batch in cut])
            self._in_flight += cut_bytes
            count, nbytes = count + len(cut), nbytes + cut_bytes
            if cut:
                taken.append((first, cut))
            # What is nearest may not move yet, nor then may anything else; or enough leaves now.
            if fresh or not cut or (count >= TURN and nbytes >= call):
                break
        return taken, exhausted


def _distance(loads: PlannedLoads) -> tuple[int, float]:
    """The order of steps: how many layers ahead of the engine the next batch is, then the deadline."""
    return loads.cursor.layer - loads.frontier, loads.deadline


IN_FLIGHT = 4
"""Batches that a window has room for at least, where blocks are that small."""

TURN = 8
"""Batches that are cut before the first of them leaves, and as many more as a call may carry: to cut hundreds of small
ones takes milliseconds, in which the first would wait."""

FIRST_LAYERS = 2
"""Of a step. They leave before the others are cut."""


class Sampling:
    """How long a lane with nothing to move sleeps until it looks again whether the engine has moved on.

    Longer and longer while it has not. An engine that has to wait for a layer wakes the lane; one that computes does
    not, so a layer of which the depth allows nothing yet begins up to this late.

    :ivar interval: until the next look; seconds.
    """

    __slots__ = ("interval",)

    def __init__(self) -> None:
        self.interval = SHORTEST_SAMPLE_S

    def moved(self) -> None:
        """Something was queued, or left."""
        self.interval = SHORTEST_SAMPLE_S

    def missed(self) -> None:
        """A look has found nothing."""
        self.interval = min(2 * self.interval, LONGEST_SAMPLE_S)


SHORTEST_SAMPLE_S, LONGEST_SAMPLE_S = 0.25e-3, 4e-3


# When a tensor-parallel rank begins a layer's copies, so that the ranks of a machine do not share a link.
#
# Time is cut into turns of `tp_size` slots, counted from zero of the monotonic clock, which all processes of a machine
# share. Each layer takes a turn of its own; within it, a rank begins in slot ``(tp_rank + layer) % tp_size``: ranks
# that load the same layers in the same turns never begin together, and none of them is always the last.


class Stagger:
    """One rank's slots.

    :param stagger_us: length of a slot; 0 = everything begins at once.
    """

    def __init__(self, tp_rank: int, tp_size: int, stagger_us: int) -> None:
        self._rank = tp_rank
        self._size = tp_size
        self._slot_s = stagger_us * 1e-6
        self._last_turn = -1

    @property
    def on(self) -> bool:
        """Is there anything to wait for?"""
        return self._slot_s > 0.0 and self._size > 1

    def begin(self, layer: int, now: float, patience_s: float) -> float:
        """When to begin a layer that could begin now. Call once for each layer, right before it is submitted.

        :param now: monotonic seconds.
        :param patience_s: a slot that is further off is not waited for.
        :returns: the slot's beginning, or `now`.
        """
        turn_s = self._slot_s * self._size
        offset = self._slot_s * ((self._rank + layer) % self._size)
        turn = max(math.ceil((now - offset) / turn_s), self._last_turn + 1)
        when = turn * turn_s + offset
        if when - now > patience_s:
            return now
        self._last_turn = turn
        return max(now, when)

"""What of a transfer is left to be moved: sorted ranges of blocks, and a cursor through the layers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from layerflow.flow.graph.step import Transfer


Span = tuple[int, int]


def joined(ranges: Iterable[Span]) -> list[Span]:
    """Ranges in any order, disjoint, as spans; neighbours that touch become one."""
    spans: list[Span] = []
    for lo, hi in sorted(ranges):
        if spans and spans[-1][1] >= lo:
            spans[-1] = (spans[-1][0], max(spans[-1][1], hi))
        else:
            spans.append((lo, hi))
    return spans


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of `spans` when `holes` are taken out."""
    left: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(holes) and holes[first][1] <= lo:
            first += 1
        at, hole = lo, first
        while hole < len(holes) and holes[hole][0] < hi:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = max(at, holes[hole][1])
            hole += 1
        if at < hi:
            left.append((at, hi))
    return left


def common(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is in both."""
    both: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(others) and others[first][1] <= lo:
            first += 1
        other = first
        while other < len(others) and others[other][0] < hi:
            both.append((max(lo, others[other][0]), min(hi, others[other][1])))
            other += 1
    return both


def touches(spans: Sequence[Span], lo: int, hi: int) -> bool:
    """Whether any block of `lo` to `hi` is in `spans`."""
    at = bisect_right(spans, (lo, hi))
    return (at < len(spans) and spans[at][0] < hi) or (at > 0 and spans[at - 1][1] > lo)


class BatchExtent(NamedTuple):
    """One batch's extent: blocks `lo` to `hi`; bytes `byte_lo` to `byte_hi` of block `lo` where it is split."""

    lo: int
    hi: int
    byte_lo: int
    byte_hi: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Cursor:
    """Blocks of a transfer that have reached the same layer.

    :param index: position of the cursor's layer within the transfer's layers; their number when all is granted.
    :param fetch: number of the fetch that has layers to bring yet; 0 = every layer is in the arena.
    :param limit: so many layers may be granted.
    :param at: next block of that layer.
    :param byte_at: bytes of block `at` that are granted already.
    """

    transfer: Transfer
    spans: list[Span]
    index: int = 0
    span_index: int = 0
    byte_at: int = 0
    fetch: int = 0
    limit: int = field(init=False)
    at: int = field(init=False)
    end: int = field(init=False)
    layer: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = 0 if self.fetch else len(self.transfer.shape.layers)
        self._enter(self.index)

    def _enter(self, index: int) -> None:
        self.index, self.span_index, self.byte_at = index, 0, 0
        self.at, self.end = self.spans[0]
        shape = self.transfer.shape
        if index < len(shape.layers):
            self.layer = shape.layers[index]
            self.block_bytes = shape.block_bytes[index]

    @property
    def exhausted(self) -> bool:
        """Every layer is granted, or no block is left."""
        return self.index >= len(self.transfer.shape.layers)

    @property
    def waiting(self) -> bool:
        """What may be granted is granted."""
        return self.index >= self.limit

    @property
    def fresh(self) -> bool:
        """Nothing of the cursor's layer is granted of the blocks that are left."""
        return not self.byte_at and self.at == self.spans[0][0]

    def permit(self, layers: int) -> None:
        """So many layers are in the arena."""
        self.limit = layers
        if layers == len(self.transfer.shape.layers):
            self.fetch = 0

    def next_extent(self, max_blocks: int, max_bytes: int) -> BatchExtent:
        """The next batch under the caps; the cursor stays."""
        block_bytes, at = self.block_bytes, self.at
        if self.byte_at or block_bytes > max_bytes:
            byte_hi = min(block_bytes, self.byte_at + max_bytes)
            return BatchExtent(at, at + 1, self.byte_at, byte_hi, byte_hi - self.byte_at)
        blocks = min(self.end - at, max_blocks, max_bytes // block_bytes)
        return BatchExtent(at, at + blocks, 0, 0, blocks * block_bytes)

    def advance(self, extent: BatchExtent) -> bool:
        """Move the cursor past `extent`; whether that finished the layer."""
        if extent.byte_hi and extent.byte_hi < self.block_bytes:
            self.byte_at = extent.byte_hi
            return False
        self.byte_at = 0
        if extent.hi < self.end:
            self.at = extent.hi
            return False
        self.span_index += 1
        if self.span_index < len(self.spans):
            self.at, self.end = self.spans[self.span_index]
            return False
        self._enter(self.index + 1)
        return True

    def absorb(self, other: Cursor) -> None:
        """Take the blocks of another fresh cursor at the same layer."""
        self.spans = joined([*self.spans, *other.spans])
        self._enter(self.index)

    def drop(self, holes: list[Span]) -> int:
        """Forget blocks of cancelled parts. Returns the bytes that were still to be granted of them, all layers."""
        gone = common(self.spans, holes)
        if not gone:
            return 0
        remaining = self.transfer.shape.tail_bytes[self.index]
        freed = 0
        for lo, hi in gone:
            granted = max(0, min(hi, self.at) - lo) * self.block_bytes
            if lo <= self.at < hi:
                granted += self.byte_at
            freed += (hi - lo) * remaining - granted
        self.spans = without(self.spans, holes)
        if not self.spans:
            self.index = len(self.transfer.shape.layers)
            return freed
        for span_index, (lo, hi) in enumerate(self.spans):
            if hi > self.at:
                self.span_index, self.end = span_index, hi
                if lo > self.at:
                    self.at, self.byte_at = lo, 0
                return freed
        self._enter(self.index + 1)
        return freed

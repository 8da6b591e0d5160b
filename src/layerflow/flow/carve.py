"""Carving batches from live ranges.

A *cohort* is a set of blocks of one strand that advance through the layers together: its spans and
one cursor (layer, block, byte within a block that is split). A strand starts as one cohort, and one
more for each fetch that brings objects into the arena layer by layer: that one is carved as far as
they are there, and waits. Cohorts that have all their layers and meet become one again. That is all
the core holds of what is still to be moved, whatever the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from layerflow.flow.spans import Span, common, joined, without

if TYPE_CHECKING:
    from layerflow.flow.steps import Strand


class Cut(NamedTuple):
    """One batch's extent: blocks `lo` to `hi`; bytes `byte_lo` to `byte_hi` of block `lo` where it is split."""

    lo: int
    hi: int
    byte_lo: int
    byte_hi: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Cohort:
    """Blocks of a strand that have reached the same layer.

    :param index: position of the cursor's layer within the strand's layers; their number when all is carved.
    :param fetch: number of the fetch that has layers to bring yet; 0 = every layer is in the arena.
    :param limit: so many layers may be carved.
    :param at: next block of that layer.
    :param byte_at: bytes of block `at` that are carved already.
    """

    strand: Strand
    spans: list[Span]
    index: int = 0
    cursor: int = 0
    byte_at: int = 0
    fetch: int = 0
    limit: int = field(init=False)
    at: int = field(init=False)
    end: int = field(init=False)
    layer: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = 0 if self.fetch else len(self.strand.shape.layers)
        self._enter(self.index)

    def _enter(self, index: int) -> None:
        self.index, self.cursor, self.byte_at = index, 0, 0
        self.at, self.end = self.spans[0]
        shape = self.strand.shape
        if index < len(shape.layers):
            self.layer = shape.layers[index]
            self.block_bytes = shape.block_bytes[index]

    @property
    def exhausted(self) -> bool:
        """Every layer is carved, or no block is left."""
        return self.index >= len(self.strand.shape.layers)

    @property
    def waiting(self) -> bool:
        """What may be carved is carved."""
        return self.index >= self.limit

    @property
    def fresh(self) -> bool:
        """Nothing of the cursor's layer is carved of the blocks that are left."""
        return not self.byte_at and self.at == self.spans[0][0]

    def permit(self, layers: int) -> None:
        """So many layers are in the arena."""
        self.limit = layers
        if layers == len(self.strand.shape.layers):
            self.fetch = 0

    def next_cut(self, max_blocks: int, max_bytes: int) -> Cut:
        """The next batch under the caps; the cursor stays."""
        block_bytes, at = self.block_bytes, self.at
        if self.byte_at or block_bytes > max_bytes:
            byte_hi = min(block_bytes, self.byte_at + max_bytes)
            return Cut(at, at + 1, self.byte_at, byte_hi, byte_hi - self.byte_at)
        blocks = min(self.end - at, max_blocks, max_bytes // block_bytes)
        return Cut(at, at + blocks, 0, 0, blocks * block_bytes)

    def advance(self, cut: Cut) -> bool:
        """Move the cursor past `cut`; whether that finished the layer."""
        if cut.byte_hi and cut.byte_hi < self.block_bytes:
            self.byte_at = cut.byte_hi
            return False
        self.byte_at = 0
        if cut.hi < self.end:
            self.at = cut.hi
            return False
        self.cursor += 1
        if self.cursor < len(self.spans):
            self.at, self.end = self.spans[self.cursor]
            return False
        self._enter(self.index + 1)
        return True

    def absorb(self, other: Cohort) -> None:
        """Take the blocks of another fresh cohort at the same layer."""
        self.spans = joined([*self.spans, *other.spans])
        self._enter(self.index)

    def drop(self, holes: list[Span]) -> int:
        """Forget dead blocks. Returns the bytes that were still to be carved of them, all layers."""
        gone = common(self.spans, holes)
        if not gone:
            return 0
        remaining = self.strand.shape.tail_bytes[self.index]
        freed = 0
        for lo, hi in gone:
            carved = max(0, min(hi, self.at) - lo) * self.block_bytes
            if lo <= self.at < hi:
                carved += self.byte_at
            freed += (hi - lo) * remaining - carved
        self.spans = without(self.spans, holes)
        if not self.spans:
            self.index = len(self.strand.shape.layers)
            return freed
        for cursor, (lo, hi) in enumerate(self.spans):
            if hi > self.at:
                self.cursor, self.end = cursor, hi
                if lo > self.at:
                    self.at, self.byte_at = lo, 0
                return freed
        self._enter(self.index + 1)
        return freed

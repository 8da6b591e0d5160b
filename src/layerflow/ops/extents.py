"""From block numbers to byte ranges: the extents of a batch, vectorized and checked once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layerflow.errors import ExtentError
from layerflow.objects import HEADER_BYTES, plane_offsets
from layerflow.ops.paged import Int64, PagedMemory, PagedPlane


class Extents(NamedTuple):
    """What one call moves: byte ranges in the arena and in engine memory, pairwise of equal length.

    :param arena: int64, shape ``(n,)``: offsets from the arena's start; or addresses in a pool that is reached past it.
    :param engine: int64, shape ``(n,)``: absolute addresses in registered engine memory.
    :param nbytes: int64, shape ``(n,)``: bytes of each.
    :param total: their sum.
    """

    arena: Int64
    engine: Int64
    nbytes: Int64
    total: int


def joined(pieces: Sequence[Extents]) -> Extents:
    """All of them, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    arena, engine, nbytes, totals = zip(*pieces, strict=True)
    return Extents(np.concatenate(arena), np.concatenate(engine), np.concatenate(nbytes), sum(totals))


class _Cut(NamedTuple):
    """The ranges of some blocks before a layer is chosen: a layer only shifts them.

    :param engine: without the plane's base.
    :param layer_step: from one layer to the next within the object.
    :param plane: the range's plane, by position.
    """

    arena: Int64
    engine: Int64
    nbytes: Int64
    layer_step: Int64
    plane: Int64


class BlockList:
    """The blocks that one group moves in one direction of a step, in the flow's numbering.

    Object and engine places are checked here, once; :meth:`extents` then cannot leave either memory.

    :param group: number of the group.
    :param arena_bytes: bytes of the arena; or int64, shape ``(n,)``: where the memory that holds each object ends.
    :param engine_blocks: int64, shape ``(n,)``: the block's id in engine memory.
    :param object_offsets: int64, shape ``(n,)``: arena offset of the header of the object that holds it.
    :param object_blocks: int64, shape ``(n,)``: blocks per layer of that object.
    :param index: int64, shape ``(n,)``: the block's position within that object.
    :raises ExtentError: naming the first block that is outside.
    """

    def __init__(
        self,
        memory: PagedMemory,
        group: int,
        arena_bytes: int | Int64,
        engine_blocks: Int64,
        object_offsets: Int64,
        object_blocks: Int64,
        index: Int64,
    ) -> None:
        arrays = (engine_blocks, object_offsets, object_blocks, index)
        if any(a.dtype != np.int64 or a.shape != engine_blocks.shape or a.ndim != 1 for a in arrays):
            raise ExtentError(
                f"group {group}: engine_blocks, object_offsets, object_blocks and index must be int64 vectors of one "
                f"length, not {[f'{a.dtype}{list(a.shape)}' for a in arrays]}"
            )
        if not 0 <= group < len(memory.spec.groups):
            raise ExtentError(f"group {group} does not exist; the model has {len(memory.spec.groups)}")
        spec = memory.spec.groups[group]
        self._memory = memory
        self._group = group
        self._block_bytes = spec.bytes_per_block
        self._check(arena_bytes, *arrays)
        self._blocks = engine_blocks.copy()
        self._layer_step = object_blocks * self._block_bytes
        self._plane_starts = plane_offsets(spec)
        self._arena = tuple(
            object_offsets + (HEADER_BYTES + object_blocks * start + index * plane.block_bytes)
            for start, plane in zip(self._plane_starts, memory.planes(spec.layers[0]), strict=True)
        )
        # Blocks that do not continue the one before.
        self._breaks: Int64 = (
            1
            + (
                (engine_blocks[1:] - engine_blocks[:-1] != 1)
                | (index[1:] - index[:-1] != 1)
                | (object_offsets[1:] != object_offsets[:-1])
            ).nonzero()[0]
        )
        self._cuts: dict[tuple[int, int, int], _Cut] = {}

    def __len__(self) -> int:
        return self._blocks.size

    @property
    def shapes(self) -> Sequence[int]:
        """See :attr:`layerflow.ops.paged.PagedMemory.shapes`."""
        return self._memory.shapes

    def extents(self, layer: int, lo: int, hi: int, byte_lo: int = 0, byte_hi: int = 0) -> Extents:
        """Byte ranges of blocks `lo` to `hi` in one layer, all planes; neighbours in both memories are merged.

        :param layer: the model's layer number, one of this group's.
        :param byte_lo: with `byte_hi`: only these bytes of the single block `lo`, numbered over the block's
            planes in storage order; 0 and 0 = whole blocks.
        :raises ExtentError: for a layer of another group or a range outside the list or the block.
        """
        if byte_lo or byte_hi:
            self._check_range([layer], lo, hi)
            return self._part(layer, self._memory.place(layer)[1], lo, hi, byte_lo, byte_hi)
        return self.layers([layer], lo, hi)

    def layers(self, layers: Sequence[int], lo: int, hi: int) -> Extents:
        """As :meth:`extents` of whole blocks, one layer after the other; each has equally many ranges.

        :param layers: of this group, with blocks that lie alike (:attr:`PagedMemory.shapes`).
        :raises ExtentError: for a layer of another group or another shape, or a range outside the list.
        """
        self._check_range(layers, lo, hi)
        memory, shape = self._memory, self._memory.shapes[layers[0]]
        if any(memory.shapes[layer] != shape for layer in layers):
            raise ExtentError(f"layers {list(layers)} do not lie alike; take their extents one by one")
        cut = self._cuts.get((lo, hi, shape))
        if cut is None:
            cut = self._cuts[lo, hi, shape] = self._cut(memory.planes(layers[0]), lo, hi)
        positions, bases = memory.origins(layers)
        arena = cut.arena + positions[:, None] * cut.layer_step
        engine = cut.engine + (bases if bases.shape[1] == 1 else bases[:, cut.plane])
        nbytes = np.empty(arena.shape, np.int64)
        nbytes[:] = cut.nbytes
        total = (hi - lo) * self._block_bytes * len(layers)
        return Extents(arena.ravel(), engine.ravel(), nbytes.ravel(), total)

    def _cut(self, planes: tuple[PagedPlane, ...], lo: int, hi: int) -> _Cut:
        """Blocks `lo` to `hi` as ranges in the group's first layer, and where other layers of its shape differ."""
        heads = self._heads(lo, hi)
        merged = heads.size < hi - lo
        columns: list[list[Int64]] = [[], [], [], [], []]
        for number, plane in enumerate(planes):
            arena, engine, step = (
                self._arena[number][lo:hi],
                self._blocks[lo:hi] * plane.stride,
                self._layer_step[lo:hi],
            )
            if plane.pieces.size > 1:
                inside = np.arange(plane.pieces.size, dtype=np.int64) * plane.piece_bytes
                arena = (arena[:, None] + inside).ravel()
                engine = (engine[:, None] + plane.pieces).ravel()
                step = step.repeat(plane.pieces.size)
            elif plane.dense and merged:
                arena, engine, step = arena[heads], engine[heads], step[heads]
            nbytes, plane_number = np.empty((2, arena.size), np.int64)
            nbytes[:], plane_number[:] = plane.piece_bytes, number
            if plane.dense and merged:
                nbytes[:-1] *= heads[1:] - heads[:-1]
                nbytes[-1:] *= hi - lo - heads[-1:]
            for column, values in zip(columns, (arena, engine, nbytes, step, plane_number), strict=True):
                column.append(values)
        return _Cut(*(column[0] if len(column) == 1 else np.concatenate(column) for column in columns))

    def _heads(self, lo: int, hi: int) -> Int64:
        """First blocks of the runs within ``lo:hi``, counted from `lo`."""
        if hi == lo:
            return np.empty(0, np.int64)
        first, last = self._breaks.searchsorted((lo + 1, hi))
        heads = np.empty(1 + last - first, np.int64)
        heads[0] = 0
        np.subtract(self._breaks[first:last], lo, out=heads[1:])
        return heads

    def _part(self, layer: int, position: int, lo: int, hi: int, byte_lo: int, byte_hi: int) -> Extents:
        block_bytes = self._memory.block_bytes(layer)
        if hi != lo + 1 or not 0 <= byte_lo < byte_hi <= block_bytes:
            raise ExtentError(
                f"layer {layer}, blocks {lo} to {hi}: bytes {byte_lo} to {byte_hi} must be a range within one block "
                f"of {block_bytes} bytes"
            )
        arena, engine, nbytes = [], [], []
        for number, plane in enumerate(self._memory.planes(layer)):
            starts = np.arange(plane.pieces.size, dtype=np.int64) * plane.piece_bytes
            low = np.maximum(starts, byte_lo - self._plane_starts[number])
            length = np.minimum(starts + plane.piece_bytes, byte_hi - self._plane_starts[number]) - low
            kept = length > 0
            arena.append(self._arena[number][lo] + self._layer_step[lo] * position + low[kept])
            engine.append(plane.base + self._blocks[lo] * plane.stride + (plane.pieces + low - starts)[kept])
            nbytes.append(length[kept])
        return Extents(np.concatenate(arena), np.concatenate(engine), np.concatenate(nbytes), byte_hi - byte_lo)

    def _check_range(self, layers: Sequence[int], lo: int, hi: int) -> None:
        for layer in layers:
            if self._memory.place(layer)[0] != self._group:
                raise ExtentError(f"layer {layer} is not in group {self._group}")
        if not 0 <= lo <= hi <= self._blocks.size:
            raise ExtentError(f"layer {layers[0]}: blocks {lo} to {hi} are outside the list of {self._blocks.size}")

    def _check(
        self, arena_bytes: int | Int64, engine_blocks: Int64, object_offsets: Int64, object_blocks: Int64, index: Int64
    ) -> None:
        spec = self._memory.spec.groups[self._group]
        row_bytes = self._block_bytes * len(spec.layers)  # one block of an object over all layers
        num_blocks = self._memory.num_blocks[self._group]
        room = arena_bytes - HEADER_BYTES
        # Products of impossible sizes may overflow: their blocks are refused whatever comes out.
        left = room - object_blocks * row_bytes
        self._refuse(
            (engine_blocks < 0) | (engine_blocks >= num_blocks),
            lambda b: f"engine block {engine_blocks[b]} is outside the {num_blocks} registered blocks",
        )
        self._refuse(
            (object_blocks < 1) | (object_blocks > room // row_bytes) | (object_offsets < 0) | (object_offsets > left),
            lambda b: (
                f"its object of {object_blocks[b]} blocks at offset {object_offsets[b]} is outside the arena of "
                f"{np.broadcast_to(arena_bytes, object_offsets.shape)[b]} bytes"
            ),
        )
        self._refuse(
            (index < 0) | (index >= object_blocks),
            lambda b: f"position {index[b]} is outside its object of {object_blocks[b]} blocks",
        )

    def _refuse(self, outside: npt.NDArray[np.bool_], describe: Callable[[int], str]) -> None:
        if outside.any():
            block = int(outside.argmax())
            raise ExtentError(f"group {self._group}, block {block} of the list: {describe(block)}")

"""From block numbers to byte ranges: the extents of a batch, vectorized and checked once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layerflow.boxes import Box
from layerflow.errors import ExtentError
from layerflow.objects import HEADER_BYTES, plane_offsets
from layerflow.ops.paged import Int64, PagedMemory, PagedPlane
from layerflow.spec import GroupSpec


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


class ObjectPart(NamedTuple):
    """What a worker reads or writes of an object whose box may be another than its own.

    :param worker: the box that the worker's memory holds.
    :param stored: the object's.
    :param wanted: layers and heads to move, within both.
    """

    worker: Box
    stored: Box
    wanted: Box


class _PlanePart(NamedTuple):
    """The same of one plane, in bytes. Both blocks are in physical order, outermost axis first.

    :param start: where the plane starts in a stored layer, in bytes per block that the object holds.
    :param stored_bytes: one stored block.
    :param inside: the first byte wanted of a stored block.
    :param lo: with `hi`: the bytes of the worker's block.
    """

    start: int
    stored_bytes: int
    inside: int
    lo: int
    hi: int


def _plane_parts(number: int, spec: GroupSpec, part: ObjectPart | None) -> tuple[_PlanePart, ...]:
    """:raises ExtentError: for boxes that do not lie in each other, or are not the group's."""
    sizes = [plane.token_bytes * spec.entries for plane in spec.planes]
    if part is None:
        return tuple(_PlanePart(at, size, 0, 0, size) for at, size in zip(plane_offsets(spec), sizes, strict=True))
    worker, stored, wanted = part
    if not (wanted.cells and worker.encloses(wanted) and stored.encloses(wanted)):
        raise ExtentError(f"group {number}: {wanted} are not in the worker's {worker} and the object's {stored}")
    if worker.layers != len(spec.layers) or any(size % worker.heads for size in sizes):
        raise ExtentError(
            f"group {number} has {len(spec.layers)} layers and planes of {sizes} bytes a block, which cannot be the "
            f"worker's box of {worker}"
        )
    parts, start = [], 0
    for size in sizes:
        head = size // worker.heads
        inside, lo = wanted.first_head - stored.first_head, wanted.first_head - worker.first_head
        parts.append(_PlanePart(start, stored.heads * head, inside * head, lo * head, (lo + wanted.heads) * head))
        start += stored.heads * head
    return tuple(parts)


_own: dict[int, tuple[GroupSpec, tuple[_PlanePart, ...], int]] = {}


def _own_parts(number: int, spec: GroupSpec) -> tuple[tuple[_PlanePart, ...], int, int]:
    """Return the parts of objects of the worker's own box, and twice the bytes of a block, here and stored."""
    known = _own.get(id(spec))
    if known is None or known[0] is not spec:
        parts = _plane_parts(number, spec, None)
        known = _own[id(spec)] = spec, parts, sum(plane.hi for plane in parts)
        while len(_own) > MOST_OWN:
            del _own[next(iter(_own))]
    return known[1], known[2], known[2]


MOST_OWN = 256
"""Groups whose parts are remembered; to hash a spec would take longer than to make them."""


def _within(plane: PagedPlane, lo: int, hi: int) -> tuple[Int64, Int64, Int64]:
    """Bytes `lo` to `hi` of a block as ranges: where each starts within them, where in engine memory, and its bytes."""
    starts = np.arange(plane.pieces.size, dtype=np.int64) * plane.piece_bytes
    low = np.maximum(starts, lo)
    nbytes = np.minimum(starts + plane.piece_bytes, hi) - low
    kept = nbytes > 0
    return (low - lo)[kept], (plane.pieces + low - starts)[kept], nbytes[kept]


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
    :param part: which layers and heads of the objects; None = they are of the worker's own box, and all of it.
    :raises ExtentError: naming the first block that is outside.
    """

    def __init__(  # noqa: PLR0917 - columns of one table
        self,
        memory: PagedMemory,
        group: int,
        arena_bytes: int | Int64,
        engine_blocks: Int64,
        object_offsets: Int64,
        object_blocks: Int64,
        index: Int64,
        part: ObjectPart | None = None,
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
        if part is None:
            self._parts, self._block_bytes, stored_bytes = _own_parts(group, spec)
        else:
            self._parts = _plane_parts(group, spec, part)
            self._block_bytes = sum(plane.hi - plane.lo for plane in self._parts)
            stored_bytes = sum(plane.stored_bytes for plane in self._parts)
        count = len(spec.layers)
        self._first_stored, self._positions = 0, range(count)
        if part is not None:
            worker, stored, wanted = part
            count, self._first_stored = stored.layers, stored.first_layer - worker.first_layer
            self._positions = range(wanted.first_layer - worker.first_layer, wanted.end_layer - worker.first_layer)
        self._check(stored_bytes * count, arena_bytes, *arrays)
        self._blocks = engine_blocks.copy()
        self._layer_step = object_blocks * stored_bytes
        self._worker_starts = plane_offsets(spec)
        self._arena = tuple(
            object_offsets + (HEADER_BYTES + object_blocks * plane.start + index * plane.stored_bytes + plane.inside)
            for plane in self._parts
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
            return self._bytes_of_block(
                layer, self._memory.place(layer)[1], lo=lo, hi=hi, byte_lo=byte_lo, byte_hi=byte_hi
            )
        return self.layers([layer], lo, hi)

    def layers(self, layers: Sequence[int], lo: int, hi: int) -> Extents:
        """As :meth:`extents` of whole blocks, one layer after the other; each has equally many ranges.

        :param layers: of this group, with blocks that lie alike (:attr:`shapes`).
        :raises ExtentError: for a layer of another group or another shape, or a range outside the list.
        """
        arena, engine, nbytes = self.rows(layers, lo, hi)
        total = (hi - lo) * self._block_bytes * len(layers)
        return Extents(arena.ravel(), engine.ravel(), nbytes.ravel(), total)

    def rows(self, layers: Sequence[int], lo: int, hi: int) -> tuple[Int64, Int64, Int64]:
        """What :meth:`layers` makes one list of: arena, engine, nbytes, each of shape ``(layers, ranges)``."""
        self._check_range(layers, lo, hi)
        memory, shape = self._memory, self._memory.shapes[layers[0]]
        if any(memory.shapes[layer] != shape for layer in layers):
            raise ExtentError(f"layers {list(layers)} do not lie alike; take their extents one by one")
        cut = self._cuts.get((lo, hi, shape))
        if cut is None:
            cut = self._cuts[lo, hi, shape] = self._cut(memory.planes(layers[0]), lo, hi)
        positions, bases = memory.origins(layers)
        arena = cut.arena + (positions[:, None] - self._first_stored) * cut.layer_step
        engine = cut.engine + (bases if bases.shape[1] == 1 else bases[:, cut.plane])
        nbytes = np.empty(arena.shape, np.int64)
        nbytes[:] = cut.nbytes
        return arena, engine, nbytes

    def _cut(self, planes: tuple[PagedPlane, ...], lo: int, hi: int) -> _Cut:
        """Blocks `lo` to `hi` as ranges in the group's first layer, and where other layers of its shape differ."""
        heads = self._heads(lo, hi)
        merged = heads.size < hi - lo
        columns: list[list[Int64]] = [[], [], [], [], []]
        for number, (plane, part) in enumerate(zip(planes, self._parts, strict=True)):
            arena, engine, step = (
                self._arena[number][lo:hi],
                self._blocks[lo:hi] * plane.stride,
                self._layer_step[lo:hi],
            )
            inside, pieces, sizes = _within(plane, part.lo, part.hi)
            joins = merged and plane.dense and part.hi - part.lo == plane.block_bytes == part.stored_bytes
            if joins:
                arena, engine, step = arena[heads], engine[heads], step[heads]
            elif sizes.size > 1:
                arena, engine = (arena[:, None] + inside).ravel(), (engine[:, None] + pieces).ravel()
                step = step.repeat(sizes.size)
            else:
                engine = engine + pieces
            nbytes, plane_number = np.empty((2, arena.size), np.int64)
            nbytes.reshape(-1, sizes.size)[:], plane_number[:] = sizes, number
            if joins:
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

    def _bytes_of_block(self, layer: int, position: int, *, lo: int, hi: int, byte_lo: int, byte_hi: int) -> Extents:
        block_bytes = self._memory.block_bytes(layer)
        if hi != lo + 1 or not 0 <= byte_lo < byte_hi <= block_bytes:
            raise ExtentError(
                f"layer {layer}, blocks {lo} to {hi}: bytes {byte_lo} to {byte_hi} must be a range within one block "
                f"of {block_bytes} bytes"
            )
        arena, engine, nbytes = [], [], []
        for number, (plane, part) in enumerate(zip(self._memory.planes(layer), self._parts, strict=True)):
            start = self._worker_starts[number]
            low, high = max(part.lo, byte_lo - start), min(part.hi, byte_hi - start)
            inside, pieces, sizes = _within(plane, low, high)
            first = self._arena[number][lo] + self._layer_step[lo] * (position - self._first_stored) + (low - part.lo)
            arena.append(first + inside)
            engine.append(plane.base + self._blocks[lo] * plane.stride + pieces)
            nbytes.append(sizes)
        sizes = np.concatenate(nbytes)
        return Extents(np.concatenate(arena), np.concatenate(engine), sizes, int(sizes.sum()))

    def _check_range(self, layers: Sequence[int], lo: int, hi: int) -> None:
        for layer in layers:
            group, position = self._memory.place(layer)
            if group != self._group:
                raise ExtentError(f"layer {layer} is not in group {self._group}")
            if position not in self._positions:
                raise ExtentError(f"layer {layer} is not among the layers that are moved of group {self._group}")
        if not 0 <= lo <= hi <= self._blocks.size:
            raise ExtentError(f"layer {layers[0]}: blocks {lo} to {hi} are outside the list of {self._blocks.size}")

    def _check(  # noqa: PLR0917 - columns of one table
        self,
        row_bytes: int,
        arena_bytes: int | Int64,
        engine_blocks: Int64,
        object_offsets: Int64,
        object_blocks: Int64,
        index: Int64,
    ) -> None:
        """:param row_bytes: of one block of an object, over all its layers."""
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

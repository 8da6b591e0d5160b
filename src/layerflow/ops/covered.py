"""The blocks of a load whose objects have other boxes than the worker: what :class:`BlockList` is for equal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from layerflow.boxes import Box, cover
from layerflow.errors import ExtentError
from layerflow.ops.extents import BlockList, Extents, ObjectPart, joined
from layerflow.ops.paged import Int64, PagedMemory


class ChunkPlaces(NamedTuple):
    """Where the objects of one chunk lie.

    :param boxes: what each object covers; :func:`layerflow.boxes.box` chooses among them.
    :param offsets: arena offset of each object's header.
    """

    boxes: tuple[Box, ...]
    offsets: tuple[int, ...]


class _Stretch(NamedTuple):
    """Blocks that read the same layers and heads of equally placed objects.

    :param numbers: int64, ascending: the flow's numbers of these blocks.
    :param layers: of the model's own numbers, those that are read here.
    """

    numbers: Int64
    layers: frozenset[int]
    blocks: BlockList


class CoveredBlocks:
    """One group's blocks of a step, loaded from objects that together cover the worker's box.

    The flow counts a block once in each layer, whatever number of objects its heads come from.

    :param arena_end: from offsets of objects, int64, to the end of the memory that holds each, or of all.
    :param worker: the box that `memory` holds of this group.
    :param chunks: the places of each chunk's objects.
    :param engine_blocks: int64, shape ``(n,)``: the block's id in engine memory.
    :param chunk: int64, shape ``(n,)``: the block's chunk, as a position in `chunks`.
    :param object_blocks: int64, shape ``(n,)``: blocks per layer of its chunk's objects.
    :param index: int64, shape ``(n,)``: the block's position within them.
    :raises ExtentError: naming the layers and heads that a chunk lacks, or the first block that is outside.
    """

    def __init__(  # noqa: PLR0917 - columns of one table
        self,
        memory: PagedMemory,
        group: int,
        arena_end: Callable[[Int64], int | Int64],
        worker: Box,
        chunks: Sequence[ChunkPlaces],
        engine_blocks: Int64,
        chunk: Int64,
        object_blocks: Int64,
        index: Int64,
    ) -> None:
        if chunk.shape != engine_blocks.shape or (chunk.size and not 0 <= chunk.min() <= chunk.max() < len(chunks)):
            raise ExtentError(f"group {group}: each block's chunk must be one of {len(chunks)}")
        self._group, self._size = group, engine_blocks.size
        own_layers = memory.spec.groups[group].layers
        self._stretches: list[_Stretch] = []
        partition = np.empty(len(chunks), np.int64)  # chunks that are stored in the same boxes
        row = np.empty(len(chunks), np.int64)  # of the chunk in its partition's table of offsets
        tables: dict[tuple[Box, ...], list[tuple[int, ...]]] = {}
        numbers: dict[tuple[Box, ...], int] = {}
        for at, (boxes, offsets) in enumerate(chunks):
            table = tables.setdefault(boxes, [])
            partition[at], row[at] = numbers.setdefault(boxes, len(numbers)), len(table)
            table.append(offsets)
        for (boxes, table), number in zip(tables.items(), numbers.values(), strict=True):
            pieces, missing = cover(worker, boxes)
            mine = (partition[chunk] == number).nonzero()[0]
            if missing:
                raise ExtentError(
                    f"group {group}, chunk {int((partition == number).argmax())} of the load: nothing stored has "
                    f"{'; '.join(map(str, missing))}"
                )
            offsets_of = np.array(table, np.int64).reshape(len(table), len(boxes))[row[chunk[mine]]]
            for source, box in pieces:
                places = np.ascontiguousarray(offsets_of[:, source])
                blocks = BlockList(
                    memory,
                    group,
                    arena_end(places),
                    engine_blocks[mine],
                    places,
                    object_blocks[mine],
                    index[mine],
                    ObjectPart(worker, boxes[source], box),
                )
                first = worker.first_layer
                layers = frozenset(own_layers[box.first_layer - first : box.end_layer - first])
                self._stretches.append(_Stretch(mine, layers, blocks))
        kinds: dict[object, int] = {}
        self.shapes: tuple[int, ...] = tuple(  #: as of :attr:`PagedMemory.shapes`: where the sources are the same too
            kinds.setdefault((shape, tuple(layer in stretch.layers for stretch in self._stretches)), len(kinds))
            for layer, shape in enumerate(memory.shapes)
        )

    @classmethod
    def of(
        cls,
        memory: PagedMemory,
        group: int,
        arena_bytes: int,
        covered: Mapping[int, ChunkPlaces],
        columns: tuple[Int64, Int64, Int64, Int64],
    ) -> CoveredBlocks:
        """For a part of whose objects some are stored as the worker's own.

        :param covered: by the offset that stands for it, where each of the others is.
        :param columns: as of :class:`BlockList`, the offsets being such ones.
        """
        worker = memory.spec.box(group)
        engine_blocks, offsets, object_blocks, index = columns
        own, chunk = np.unique(offsets, return_inverse=True)
        chunks = [covered.get(offset) or ChunkPlaces((worker,), (offset,)) for offset in own.tolist()]
        return cls(
            memory, group, lambda _: arena_bytes, worker, chunks, engine_blocks, chunk.ravel(), object_blocks, index
        )

    def __len__(self) -> int:
        return self._size

    def extents(self, layer: int, lo: int, hi: int, byte_lo: int = 0, byte_hi: int = 0) -> Extents:
        """As :meth:`BlockList.extents`; the bytes of a block are the worker's."""
        if not byte_lo and not byte_hi:
            return self.layers([layer], lo, hi)
        self._check_range([layer], lo, hi)
        if hi != lo + 1:
            raise ExtentError(f"layer {layer}, blocks {lo} to {hi}: a range of bytes is of one block")
        parts = []
        for stretch in self._stretches:
            first, last = stretch.numbers.searchsorted((lo, hi))
            if layer in stretch.layers and last > first:
                parts.append(stretch.blocks.extents(layer, int(first), int(last), byte_lo, byte_hi))
        return joined(parts)

    def layers(self, layers: Sequence[int], lo: int, hi: int) -> Extents:
        """As :meth:`BlockList.layers`."""
        self._check_range(layers, lo, hi)
        if any(self.shapes[layer] != self.shapes[layers[0]] for layer in layers):
            raise ExtentError(f"layers {list(layers)} do not lie alike; take their extents one by one")
        rows = []
        for stretch in self._stretches:
            if layers[0] in stretch.layers:
                first, last = stretch.numbers.searchsorted((lo, hi))
                rows.append(stretch.blocks.rows(layers, int(first), int(last)))
        if not rows:
            none = np.empty(0, np.int64)
            return Extents(none, none, none, 0)
        arena, engine, nbytes = (np.concatenate(column, axis=1).ravel() for column in zip(*rows, strict=True))
        return Extents(arena, engine, nbytes, int(nbytes.sum()))

    def _check_range(self, layers: Sequence[int], lo: int, hi: int) -> None:
        for layer in layers:
            if not any(layer in stretch.layers for stretch in self._stretches) and self._stretches:
                raise ExtentError(f"layer {layer} is not in group {self._group}")
        if not 0 <= lo <= hi <= self._size:
            raise ExtentError(f"layer {layers[0]}: blocks {lo} to {hi} are outside the list of {self._size}")

"""A box, the box that a worker holds, who of equal workers stores a chunk, and a box put together from others."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from layerflow.errors import SpecError

TO_THE_END = 1 << 12
"""The end of a box that reaches to its group's last layer, however many layers there are: more than any group has."""


class Box(NamedTuple):
    """Layers x heads of one group of a model. Ends are exclusive.

    Layers are counted within the group over the whole model: layer 3 is the group's fourth, whichever pipeline stage
    has it. Heads are the model's KV heads. A group whose planes have no head axis (latent, indexer, their scales)
    counts as one head, which every tensor rank holds.
    """

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head

    @property
    def cells(self) -> int:
        """Pairs of a layer and a head; 0 = the box is empty."""
        return max(0, self.layers) * max(0, self.heads)

    def overlap(self, other: Box) -> Box:
        """What both cover; of no cells where they do not meet."""
        return Box(
            max(self.first_layer, other.first_layer),
            min(self.end_layer, other.end_layer),
            max(self.first_head, other.first_head),
            min(self.end_head, other.end_head),
        )

    def encloses(self, other: Box) -> bool:
        """Covers all of a box that is not empty."""
        return self.overlap(other) == other

    def of_layers(self, count: int) -> Box:
        """The same box of a group that has `count` layers, where it reaches to whatever end the group has."""
        return self._replace(end_layer=count) if self.end_layer == TO_THE_END else self

    def __str__(self) -> str:
        layers, heads = _span(self.first_layer, self.end_layer), _span(self.first_head, self.end_head)
        return f"layers {layers}, heads {heads}"


class Replica(NamedTuple):
    """One of `copies` workers that hold the same bytes.

    :param number: from 0, ascending with the tensor rank.
    """

    number: int
    copies: int

    def is_writer(self, key: bytes) -> bool:
        """Is an object this worker's to store? It is exactly one's of the equal workers, each one's equally often.

        :param key: of the object, or its digest.
        """
        return self.copies == 1 or int.from_bytes(key[:8], "little") % self.copies == self.number


def worker_box(stage: tuple[int, int], heads: int, tp_rank: int, tp_size: int) -> Box:
    """What a tensor rank holds of a group.

    Heads are spread as evenly as contiguous shares allow; where there are fewer heads than ranks, neighbouring ranks
    hold the same one, as in vLLM and SGLang.

    :param stage: first and end layer of the worker's pipeline stage, as in :class:`Box`.
    :param heads: KV heads of the model; 1 for planes without a head axis.
    :raises SpecError: for a rank outside its size, no head or no layer.
    """
    if not (0 <= tp_rank < tp_size and heads > 0 and 0 <= stage[0] < stage[1]):
        raise SpecError(
            f"tensor rank {tp_rank} of {tp_size}, {heads} heads, layers {_span(*stage)}: "
            "a worker holds at least one layer and one head, and its rank is below the tensor size"
        )
    first = tp_rank * heads // tp_size
    return Box(stage[0], stage[1], first, max(first + 1, (tp_rank + 1) * heads // tp_size))


def replica_of(heads: int, tp_rank: int, tp_size: int) -> Replica:
    """Which of the tensor ranks that hold the same heads a rank is; arguments as of :func:`worker_box`."""
    if heads >= tp_size:
        return Replica(0, 1)
    head = tp_rank * heads // tp_size
    first, end = -(-head * tp_size // heads), -(-(head + 1) * tp_size // heads)
    return Replica(tp_rank - first, end - first)


def _span(first: int, end: int) -> str:
    return f"{first}" if end == first + 1 else f"{first} to {end - 1}"


# A reader's box put together from stored boxes: each layer and head from exactly one of them.


_MISSING = -1


class Piece(NamedTuple):
    """What one stored box contributes.

    :param source: its position among the stored boxes.
    :param box: the layers and heads that are read of it.
    """

    source: int
    box: Box


class Cover(NamedTuple):
    """:func:`cover`'s answer: disjoint boxes that together are the reader's.

    :param pieces: by first layer, then first head.
    :param missing: what no stored box has; empty = the reader can load.
    """

    pieces: tuple[Piece, ...]
    missing: tuple[Box, ...]


@functools.lru_cache(4096)
def cover(reader: Box, stored: tuple[Box, ...]) -> Cover:
    """Choose what to read for `reader`.

    The reader's own box is taken whole where it is stored; otherwise boxes that share more with it go first. The
    choice depends on the boxes only, not on their order, except that of equal boxes the first is read.

    :param stored: boxes of one chunk's objects; they may overlap.
    """
    parts = [reader.overlap(box) for box in stored]
    ranked = sorted(
        (n for n, part in enumerate(parts) if part.cells),
        key=lambda n: (stored[n] != reader, -parts[n].cells, stored[n], n),
    )
    layer_cuts = _cuts(reader.first_layer, reader.end_layer, (cut for n in ranked for cut in parts[n][:2]))
    head_cuts = _cuts(reader.first_head, reader.end_head, (cut for n in ranked for cut in parts[n][2:]))
    rows = [[_MISSING] * (len(head_cuts) - 1) for _ in layer_cuts[1:]]
    for n in ranked:
        box = parts[n]
        for row in rows[layer_cuts.index(box.first_layer) : layer_cuts.index(box.end_layer)]:
            for column in range(head_cuts.index(box.first_head), head_cuts.index(box.end_head)):
                if row[column] == _MISSING:
                    row[column] = n
    boxes = _merged(rows, layer_cuts, head_cuts)
    return Cover(
        tuple(Piece(source, box) for box, source in boxes if source != _MISSING),
        tuple(box for box, source in boxes if source == _MISSING),
    )


def _cuts(first: int, end: int, borders: Iterable[int]) -> list[int]:
    return sorted({first, end, *borders})


def _merged(rows: list[list[int]], layer_cuts: list[int], head_cuts: list[int]) -> list[tuple[Box, int]]:
    """Neighbouring cells of one source as boxes: along the heads first, then down the layers."""
    done: list[tuple[Box, int]] = []
    open_runs: dict[tuple[int, int, int], int] = {}  # (first head, end head, source) -> first layer
    for row, first_layer in zip([*rows, []], layer_cuts, strict=True):
        runs: dict[tuple[int, int, int], int] = {}
        column = 0
        while column < len(row):
            end = column + 1
            while end < len(row) and row[end] == row[column]:
                end += 1
            run = (head_cuts[column], head_cuts[end], row[column])
            runs[run] = open_runs.pop(run, first_layer)
            column = end
        done += [(Box(layer, first_layer, *run[:2]), run[2]) for run, layer in open_runs.items()]
        open_runs = runs
    return sorted(done)

"""A reader's box put together from stored boxes: each layer and head from exactly one of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from layerflow.boxes.box import Box

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

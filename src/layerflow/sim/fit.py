"""What a machine takes, fitted from what was recorded of it: a link by its batches, a layer by its tokens. Pure.

Least squares of the *relative* error, no coefficient negative, so that what took absurdly long (a page fault, a pause)
weighs next to nothing; then scaled so that half of all observations took longer. Of two fits that are as good, the one
with fewer terms is taken: batches of one size tell a rate and no more.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layerflow.flow.cost import ComputeCost, LinkCost, attention_pairs
from layerflow.sim.worker import LinkTimes

LEAST = 3
"""Observations that tell something."""

AS_GOOD = 0.05
"""A further term is believed in where it leaves so much less of the error unexplained, as a share."""

_NOTHING = 1e-9
_INSTANT = 5e-6
_RESOLUTION = 1.5e-6  # spans are told in microseconds


@dataclass(frozen=True, slots=True)
class MovedBatch:
    """A batch that has passed a link. Seconds of one clock.

    :param beside: the other direction moved something while it passed.
    """

    began: float
    ended: float
    nbytes: int
    blocks: int
    layer: int = 0
    beside: bool = False


def fit_link(lanes: Iterable[Iterable[MovedBatch]]) -> LinkTimes | None:
    """Fit one direction of what passed each worker's lane; None: too little has.

    Batches pass one after the other: each takes from the end of the one before it, and one that begins later pays the
    latency, too::

        seconds = latency (of the first in a row) + batch + blocks * block + bytes / bandwidth
    """
    alone: list[tuple[Sequence[float], float]] = []
    beside: list[tuple[Sequence[float], float]] = []
    for lane in lanes:
        for each, first, seconds in _passed(lane):
            row = (float(first), 1.0, float(each.blocks), float(each.nbytes))
            (beside if each.beside else alone).append((row, seconds))
    known = alone if len(alone) >= LEAST else alone + beside
    found = least_relative_error(known, preferred=3)
    if found is None:
        return None
    latency, batch, block, per_byte = found
    ratios = [seconds / sum(map(operator.mul, found, row)) for row, seconds in beside]
    slower = max(1.0, statistics.median(ratios)) if known is alone and len(ratios) >= LEAST else 1.0
    bandwidth = 1.0 / per_byte if per_byte > 0.0 else math.inf
    return LinkTimes(LinkCost(bandwidth, latency), batch, block, slower)


def slowdowns(times: LinkTimes, lane: Iterable[MovedBatch]) -> dict[int, float]:
    """By layer, how many times as long as they would pass its batches had the link to themselves, latency included."""
    took: defaultdict[int, float] = defaultdict(float)
    fitted: defaultdict[int, float] = defaultdict(float)
    for each, _, seconds in _passed(lane):
        took[each.layer] += seconds
        beside = times.beside if each.beside else 1.0
        fitted[each.layer] += times.passing(each.nbytes, each.blocks) * beside
    return {layer: took[layer] / seconds for layer, seconds in fitted.items() if seconds > 0.0}


def _passed(lane: Iterable[MovedBatch]) -> Iterator[tuple[MovedBatch, bool, float]]:
    """Each batch, whether the link was idle before it, and for how long it had the link to itself."""
    free_at = -math.inf
    for each in sorted(lane, key=lambda batch: (batch.began, batch.ended)):
        seconds = each.ended - max(each.began, free_at)
        if seconds > _RESOLUTION and each.nbytes > 0:
            yield each, each.began > free_at + _INSTANT, seconds
        free_at = max(free_at, each.ended)


def fit_compute(layers: Iterable[tuple[int, int, float]]) -> ComputeCost | None:
    """Fit (new tokens, context tokens, seconds of one layer); None: too little is known."""
    rows = [
        ((1.0, float(new), attention_pairs(new, context)), seconds)
        for new, context, seconds in layers
        if new > 0 and seconds > 0.0
    ]
    found = least_relative_error(rows, preferred=1)
    return ComputeCost(*found) if found is not None else None


def least_relative_error(rows: Sequence[tuple[Sequence[float], float]], *, preferred: int) -> tuple[float, ...] | None:
    """Coefficients, none negative, of ``seconds = sum(coefficient * amount)``; None: too few rows.

    :param rows: amounts and seconds. :param preferred: the amount that counts in any case.
    """
    if len(rows) < LEAST:
        return None
    amounts = np.array([row for row, _ in rows])
    relative = amounts / np.array([seconds for _, seconds in rows])[:, None]
    count = relative.shape[1]
    best: tuple[float, ...] | None = None
    least = math.inf
    order = sorted(range(count), key=lambda at: at != preferred)
    for size in range(1, count + 1):
        for others in itertools.combinations(order[1:], size - 1):
            subset = (preferred, *others)
            columns = relative[:, subset]
            scale = np.linalg.norm(columns, axis=0)
            if not scale.all():
                continue
            values, _, rank, _ = np.linalg.lstsq(columns / scale, np.ones(len(rows)), rcond=1e-6)
            if rank < size or values.min() < 0.0:
                continue
            unexplained = float(np.mean((columns @ (values / scale) - 1.0) ** 2)) + _NOTHING
            if unexplained < least * (1.0 - AS_GOOD):
                told = dict(zip(subset, (values / scale).tolist(), strict=True))
                best, least = tuple(told.get(at, 0.0) for at in range(count)), unexplained
    if best is None:
        return None
    level = float(np.median(relative @ np.array(best)))
    return tuple(value / level for value in best) if level > 0.0 else best

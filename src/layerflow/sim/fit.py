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
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from layerflow.flow.cost import ComputeCost, LinkCost, attention_pairs
from layerflow.sim.worker import LinkTimes

LEAST = 3
"""Observations that tell something."""

LEAST_BESIDE = 8
"""Batches beside the other direction that tell how much it slows them down."""

AS_GOOD = 0.05
"""A further term is believed in where it leaves so much less of the error unexplained, as a share."""

USUAL = 0.95
"""A lane's thread wakes up as late as the mean of so large a share of batches tells; the latest are not its doing."""

FAR_OFF = 3.0
"""Times."""

VARIED = 4
"""Passes that compute so many times as many tokens as others do tell apart what a pass takes and what a token does."""
RATE_REACHES = 16
"""What so many times the tokens take follows from a token's own time. An engine may spread them over several passes."""
ALL_REACHES = 2
"""From passes of one size, only what up to twice or half as many tokens take, and likewise what contexts up to twice as
long do."""

_NOTHING = 1e-9
_INSTANT = 5e-6
_RESOLUTION = 1.5e-6  # spans are told in microseconds


@dataclass(frozen=True, slots=True)
class MovedBatch:
    """A batch that has passed a link. Seconds of one clock.

    :param emulated: its link is: it began when it began to pass, and ends when a thread has seen that it arrived.
    :param beside: the other direction moved something while it passed.
    """

    began: float
    ended: float
    nbytes: int
    blocks: int
    layer: int = 0
    beside: bool = False
    emulated: bool = False


def fit_link(lanes: Sequence[Sequence[MovedBatch]]) -> LinkTimes | None:
    """Fit one direction of what passed each worker's lane; None: too little has.

    Batches pass one after the other: each takes from the end of the one before it, and one that begins later pays the
    latency, too::

        seconds = latency (of the first in a row) + batch + blocks * block + bytes / bandwidth
    """
    alone: list[tuple[Sequence[float], float]] = []
    beside: list[tuple[Sequence[float], float]] = []
    for lane in lanes:
        for each, free_at, seconds in _passed(lane):
            first = float(each.began > free_at + _INSTANT)
            row = (first, 1.0, float(each.blocks), float(each.nbytes))
            (beside if each.beside else alone).append((row, seconds))
    known = alone if len(alone) >= LEAST else alone + beside
    found = least_relative_error(known, preferred=3)
    if found is None:
        return None
    latency, batch, block, per_byte = found
    ratios = [seconds / sum(map(operator.mul, found, row)) for row, seconds in beside]
    slower = max(1.0, statistics.median(ratios)) if known is alone and len(ratios) >= LEAST_BESIDE else 1.0
    bandwidth = 1.0 / per_byte if per_byte > 0.0 else math.inf
    return LinkTimes(LinkCost(bandwidth, latency), batch, block, slower)


def emulated_link(cost: LinkCost, lanes: Sequence[Sequence[MovedBatch]]) -> LinkTimes | None:
    """Take one direction of an emulated link as its settings say, and fit what its lane's thread adds; None: as above.

    Batches of one size do not tell a rate from a latency, and latencies that overlap look like a slower rate.
    """
    times = LinkTimes(cost)
    late = sorted(seconds for lane in lanes for _, seconds in _handled(times, lane))
    if len(late) < LEAST:
        return None
    return replace(times, lane_batch_seconds=statistics.fmean(late[: math.ceil(len(late) * USUAL)]))


def slowdowns(times: LinkTimes, lane: Iterable[MovedBatch]) -> dict[int, float]:
    """By layer, how many times as long as fitted its batches took, from when the first could pass to the last's end.

    A layer's first batch could pass one latency before the batch ahead of it had arrived.
    """
    took: defaultdict[int, float] = defaultdict(float)
    fitted: defaultdict[int, float] = defaultdict(float)
    latency = times.cost.latency
    for each, free_at, seconds in _passed(lane):
        if each.layer not in fitted:
            fitted[each.layer] = latency
            took[each.layer] = min(latency, max(0.0, free_at - each.began))
        took[each.layer] += seconds
        beside = times.beside if each.beside else 1.0
        fitted[each.layer] += times.passing(each.nbytes, each.blocks) * beside
    return {layer: took[layer] / seconds for layer, seconds in fitted.items() if seconds > 0.0}


def lateness(times: LinkTimes, lane: Iterable[MovedBatch]) -> dict[int, float]:
    """By layer, how much longer than fitted the lane's thread took for batches that had arrived, together; seconds."""
    late: defaultdict[int, float] = defaultdict(float)
    for each, seconds in _handled(times, lane):
        late[each.layer] += seconds - times.lane_batch_seconds
    return dict(late)


def _handled(times: LinkTimes, lane: Iterable[MovedBatch]) -> Iterator[tuple[MovedBatch, float]]:
    """Each batch of an emulated link, and how long the lane's thread took for it once it had arrived."""
    free_at = -math.inf
    for each in sorted(lane, key=lambda batch: (batch.began, batch.ended)):
        arrived = each.began + times.passing(each.nbytes, each.blocks) + times.cost.latency
        yield each, max(0.0, each.ended - max(arrived, free_at))
        free_at = max(free_at, each.ended)


def _passed(lane: Iterable[MovedBatch]) -> Iterator[tuple[MovedBatch, float, float]]:
    """Each batch, when all before it had arrived, and for how long it had the link to itself."""
    free_at = -math.inf
    for each in sorted(lane, key=lambda batch: (batch.began, batch.ended)):
        seconds = each.ended - max(each.began, free_at)
        if seconds > _RESOLUTION and each.nbytes > 0:
            yield each, free_at, seconds
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


@dataclass(frozen=True, slots=True)
class Reach:
    """What a fitted compute can be asked. Beyond it the answer is a guess.

    :param least: tokens that a pass computes, at least; :param tokens: and at most.
    :param context: the last of them is so far into its prompt, at most.
    """

    least: float = 0.0
    tokens: int = 0
    context: int = 0

    def tells(self, tokens: int, context: int) -> bool:
        """Is what such a pass takes known?"""
        return self.least <= tokens <= self.tokens and context <= self.context


def compute_reach(layers: Sequence[tuple[int, int, float]], fitted: ComputeCost | None) -> Reach:
    """What the fit of these (see :func:`fit_compute`) can be asked: as far as several of those reach that it explains.

    :param fitted: None = nothing.
    """
    explained = [
        (new, new + context)
        for new, context, seconds in layers
        if fitted is not None and new > 0 and seconds / FAR_OFF < fitted.layer_seconds(new, context) < seconds * FAR_OFF
    ]
    if len(explained) < LEAST:
        return Reach()
    tokens, contexts = (sorted(each) for each in zip(*explained, strict=True))
    few, many = tokens[LEAST - 1], tokens[-LEAST]
    context = contexts[-LEAST] * ALL_REACHES
    if many >= VARIED * few:
        return Reach(0.0, many * RATE_REACHES, context)
    return Reach(few / ALL_REACHES, many * ALL_REACHES, context)


def layer_shares(passes: Iterable[Sequence[float]], count: int) -> tuple[float, ...]:
    """By layer, what it computes, as a share of the mean one: full attention takes longer than a window's.

    The median of all passes, as far as they tell all layers' times; all alike where fewer than :data:`LEAST` do.

    :param passes: of each, its layers' seconds. :param count: of a model's layers.
    """
    rows = np.array([layers for layers in passes if len(layers) == count and sum(layers) > 0.0])
    if len(rows) < LEAST:
        return (1.0,) * count
    shares = np.median(rows / rows.mean(axis=1, keepdims=True), axis=0)
    return tuple((shares / shares.mean()).tolist())


def least_relative_error(rows: Sequence[tuple[Sequence[float], float]], *, preferred: int) -> tuple[float, ...] | None:
    """Coefficients, none negative, of ``seconds = sum(coefficient * amount)``; None: too few rows.

    Fitted twice: what is further off than :data:`FAR_OFF` says nothing the second time.

    :param rows: amounts and seconds. :param preferred: the amount that counts in any case.
    """
    if len(rows) < LEAST:
        return None
    relative = np.array([row for row, _ in rows]) / np.array([seconds for _, seconds in rows])[:, None]
    found = _best_of(relative, preferred)
    foretold = relative @ found
    near = (foretold > 1.0 / FAR_OFF) & (foretold < FAR_OFF)
    if LEAST <= near.sum() < len(rows):
        found = _best_of(relative[near], preferred)
    return tuple(found.tolist())


def _best_of(relative: NDArray[np.float64], preferred: int) -> NDArray[np.float64]:
    """The coefficients that explain most, of all sets of terms; by rows, amounts of one second."""
    count = relative.shape[1]
    best, least = np.zeros(count), math.inf
    others = [at for at in range(count) if at != preferred]
    for size in range(count):
        for more in itertools.combinations(others, size):
            subset = [preferred, *more]
            columns = relative[:, subset]
            scale = np.linalg.norm(columns, axis=0)
            if not scale.all():
                continue
            values, _, rank, _ = np.linalg.lstsq(columns / scale, np.ones(len(relative)), rcond=1e-6)
            if rank < len(subset) or values.min() < 0.0:
                continue
            unexplained = float(np.mean((columns @ (values / scale) - 1.0) ** 2)) + _NOTHING
            if unexplained < least * (1.0 - AS_GOOD):
                best, least = np.zeros(count), unexplained
                best[subset] = values / scale
    level = float(np.median(relative @ best))
    return best / level if level > 0.0 else best

"""Are settings better? What pairs of windows, one under each, say of a figure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

LEAST_PAIRS: Final = 5
"""With fewer even pairs that all agree happen by chance in more than one of 20 cases: 1/2^4."""
SIGNIFICANT: Final = 0.05
_EXACT: Final = 14
"""Up to so many pairs all 2^n signs are tried."""
_SAMPLES: Final = 10_000
_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Paired:
    """One figure under both.

    :param difference: tuned less the file's, mean over pairs. :param low, high: of its 95 % interval.
    :param p_lower, p_higher: how often such a difference, or one further down or up, comes about where the settings
        make none.
    :param lower, higher: pairs whose tuned window has less, or more.
    """

    pairs: int
    file: float
    tuned: float
    difference: float
    low: float
    high: float
    p_lower: float
    p_higher: float
    lower: int
    higher: int


NONE: Final = Paired(0, math.nan, math.nan, math.nan, math.nan, math.nan, 1.0, 1.0, 0, 0)


def compare(file: Sequence[float], tuned: Sequence[float]) -> Paired:
    """Compare window by window; pairs of which one has no such figure (NaN) are left out.

    Where settings make no difference, each pair could as well have come the other way round: the test turns pairs in
    all ways, or in many at random (Fisher's randomisation test). The interval is a percentile bootstrap over pairs.
    """
    both = np.array([pair for pair in zip(file, tuned, strict=True) if not any(map(math.isnan, pair))], dtype=float)
    if not len(both):
        return NONE
    differences = both[:, 1] - both[:, 0]
    count, mean = len(differences), float(differences.mean())
    random = np.random.default_rng(_SEED)
    if count <= _EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=count)))
    else:
        signs = random.choice((1.0, -1.0), (_SAMPLES, count))
        signs[0] = 1.0
    turned = signs @ differences / count
    slack = 1e-12 * float(np.abs(differences).max())
    means = differences[random.integers(0, count, (_SAMPLES, count))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Paired(
        count,
        float(both[:, 0].mean()),
        float(both[:, 1].mean()),
        mean,
        float(low),
        float(high),
        float((turned <= mean + slack).mean()),
        float((turned >= mean - slack).mean()),
        int((differences < 0).sum()),
        int((differences > 0).sum()),
    )


def binomial_tail(hits: int, of: int, chance: float) -> float:
    """The chance of `hits` or more of `of`, each of which has this `chance`."""
    if hits <= 0:
        return 1.0
    if chance <= 0.0:
        return 0.0
    if chance >= 1.0:
        return 1.0
    logs = [
        math.lgamma(of + 1)
        - math.lgamma(count + 1)
        - math.lgamma(of - count + 1)
        + count * math.log(chance)
        + (of - count) * math.log1p(-chance)
        for count in range(hits, of + 1)
    ]
    most = max(logs, default=-math.inf)
    return min(1.0, math.exp(most) * sum(math.exp(each - most) for each in logs)) if logs else 0.0

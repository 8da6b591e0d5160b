"""Samples as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and count; empty for no samples."""
    if not samples:
        return {}
    low, high = np.percentile(samples, (25, 75))
    return {
        "median": round(statistics.median(samples), 3),
        "p25": round(float(low), 3),
        "p75": round(float(high), 3),
        "min": round(min(samples), 3),
        "max": round(max(samples), 3),
        "count": len(samples),
    }


def tail(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, the largest, and count; empty for no samples."""
    if not samples:
        return {}
    p50, p90, p99 = np.percentile(samples, (50, 90, 99))
    return {
        "p50": round(float(p50), 3),
        "p90": round(float(p90), 3),
        "p99": round(float(p99), 3),
        "max": round(max(samples), 3),
        "count": len(samples),
    }


def ratio(mine: float | None, other: float | None) -> float | None:
    """`mine` ÷ `other`; None where one is missing."""
    return round(mine / other, 4) if mine is not None and other else None


def pair_ratio(mine: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The spread of ratios of neighbouring samples: what the machine did meanwhile, it did to both."""
    ratios = [one / another for one, another in zip(mine, other, strict=True)]
    return spread(ratios) | certain(ratios)


def certain(samples: Sequence[float]) -> dict[str, float]:
    """``low`` and ``high``: between them is, 19 times out of 20, the median of ever more such samples."""
    if not samples:
        return {}
    # Order statistics: how many of n samples are below the median is binomial, so that no distribution is assumed.
    away, ordered = 0.98 * math.sqrt(len(samples)), sorted(samples)
    low, high = round(len(samples) / 2 - away), round(len(samples) / 2 + away)
    return {"low": round(ordered[max(0, low - 1)], 3), "high": round(ordered[min(len(samples) - 1, high)], 3)}


def moved(before: Mapping[str, Any], after: Mapping[str, Any], direction: str) -> dict[str, float]:
    """Seconds of transfer between two readings of a layerflow server's figures: in all, hidden and exposed.

    A figure of which nothing was counted yet is in no reading.
    """
    return {
        part: after.get(name, {}).get(direction, 0.0) - before.get(name, {}).get(direction, 0.0)
        for part, name in (
            ("transfer_s", "transfer_seconds_total"),
            ("hidden_s", "hidden_seconds_total"),
            ("exposed_s", "exposed_seconds_total"),
        )
    }

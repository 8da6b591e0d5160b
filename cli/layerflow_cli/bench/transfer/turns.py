"""Calls that are compared take turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]


def median_seconds(calls: Mapping[str, Call], turns: int) -> dict[str, float]:
    """What each call takes, seconds: the median; the first turn warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}

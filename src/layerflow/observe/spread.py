"""How values spread, as counts that can be subtracted: what came between two looks has quantiles of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LEAST_S: Final = 1e-6
"""Shorter times count as this."""
GROWTH: Final = 1.05
"""A value is known to be within a factor of so much: its quantiles are told to 2.5 %."""
_LOG_GROWTH: Final = math.log(GROWTH)


@dataclass(slots=True)
class Spread:
    """Times in seconds, counted by their logarithm.

    :ivar counts: by number *n*: times in (LEAST_S · GROWTH^(n-1), LEAST_S · GROWTH^n].
    """

    count: int = 0
    total_s: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a time."""
        number = max(0, math.ceil(math.log(max(seconds, LEAST_S) / LEAST_S) / _LOG_GROWTH))
        self.counts[number] = self.counts.get(number, 0) + times
        self.count += times
        self.total_s += seconds * times

    def since(self, before: Spread) -> Spread:
        """What has come since an earlier look at the same counts."""
        counts = {number: count - before.counts.get(number, 0) for number, count in self.counts.items()}
        left = {number: count for number, count in counts.items() if count > 0}
        return Spread(self.count - before.count, self.total_s - before.total_s, left)

    def plus(self, other: Spread) -> Spread:
        """Both together."""
        counts = dict(self.counts)
        for number, count in other.counts.items():
            counts[number] = counts.get(number, 0) + count
        return Spread(self.count + other.count, self.total_s + other.total_s, counts)

    @property
    def mean_s(self) -> float:
        """NaN where there is none."""
        return self.total_s / self.count if self.count else math.nan

    def quantile_s(self, share: float) -> float:
        """The time that `share` of all reach at most, to 2.5 %; NaN where there is none."""
        wanted, seen = math.ceil(share * self.count), 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= max(1, wanted):
                return LEAST_S if not number else LEAST_S * math.exp((number - 0.5) * _LOG_GROWTH)
        return math.nan

    def above(self, seconds: float) -> int:
        """How many were longer, by a whole step of :data:`GROWTH`."""
        number = math.ceil(math.log(max(seconds, LEAST_S) / LEAST_S) / _LOG_GROWTH)
        return sum(count for at, count in self.counts.items() if at > number)

    def plain(self) -> dict[str, Any]:
        """For JSON; :func:`spread_of` reads it."""
        return {
            "count": self.count,
            "total_s": self.total_s,
            "least_s": LEAST_S,
            "growth": GROWTH,
            "counts": {str(number): count for number, count in sorted(self.counts.items())},
        }


def spread_of(found: Mapping[str, Any]) -> Spread:
    """What :meth:`Spread.plain` has written."""
    counts = {int(number): int(count) for number, count in found["counts"].items()}
    return Spread(int(found["count"]), float(found["total_s"]), counts)

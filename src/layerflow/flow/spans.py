"""Sorted, disjoint, non-empty ranges of block numbers: the only way the core ever holds blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def joined(ranges: Iterable[Span]) -> list[Span]:
    """Ranges in any order, disjoint, as spans; neighbours that touch become one."""
    spans: list[Span] = []
    for lo, hi in sorted(ranges):
        if spans and spans[-1][1] >= lo:
            spans[-1] = (spans[-1][0], max(spans[-1][1], hi))
        else:
            spans.append((lo, hi))
    return spans


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of `spans` when `holes` are taken out."""
    left: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(holes) and holes[first][1] <= lo:
            first += 1
        at, hole = lo, first
        while hole < len(holes) and holes[hole][0] < hi:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = max(at, holes[hole][1])
            hole += 1
        if at < hi:
            left.append((at, hi))
    return left


def common(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is in both."""
    both: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(others) and others[first][1] <= lo:
            first += 1
        other = first
        while other < len(others) and others[other][0] < hi:
            both.append((max(lo, others[other][0]), min(hi, others[other][1])))
            other += 1
    return both


def touches(spans: Sequence[Span], lo: int, hi: int) -> bool:
    """Whether any block of `lo` to `hi` is in `spans`."""
    at = bisect_right(spans, (lo, hi))
    return (at < len(spans) and spans[at][0] < hi) or (at > 0 and spans[at - 1][1] > lo)

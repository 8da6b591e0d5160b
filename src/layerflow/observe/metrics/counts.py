"""Counts since something's start, read off its snapshots, as counters."""

from __future__ import annotations

from prometheus_client import Counter


class CountsSeen:
    """What each counter was raised by so far."""

    def __init__(self) -> None:
        self._seen: dict[Counter, int] = {}

    def raise_to(self, counter: Counter, count: int) -> None:
        """`count` is what was counted since somebody's start: after another start the counter adds on."""
        before = self._seen.get(counter, 0)
        counter.inc(count - before if count >= before else count)
        self._seen[counter] = count

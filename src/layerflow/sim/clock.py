"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Runs actions in the order of their times; those of one time in the order in which they were scheduled.

    :ivar now: seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, when: float, action: Action) -> None:
        """Run an action at a time; one that has passed is now."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), action))

    def run(self) -> None:
        """Run until nothing is left to be run."""
        heap = self._heap
        while heap:
            self.now, _, action = heapq.heappop(heap)
            action()

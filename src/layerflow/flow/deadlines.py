"""The earliest deadline of all steps and transfers, without a timer: a heap with lazy deletion."""

from __future__ import annotations

import heapq
import math

from layerflow.flow.steps import Step
from layerflow.flow.transfers import Transfer

Timed = Step | Transfer

_SLACK = 16


class Deadlines:
    """When which step or transfer next wants to be looked at. Each has at most one valid entry: its `alarm`."""

    __slots__ = ("_armed", "_heap", "_number")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._number = 0
        self._armed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, step: Timed, when: float) -> None:
        """Look at `step` at `when`; ``inf`` = no more."""
        if step.alarm == when:
            return
        self._armed += (when != math.inf) - (step.alarm != math.inf)
        step.alarm = when
        if when != math.inf:
            self._number += 1
            heapq.heappush(self._heap, (when, self._number, step))
        if not self._armed:
            self._heap.clear()
        elif len(self._heap) > 2 * self._armed + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].alarm == entry[0]]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Timed | None:
        """What has an alarm that has passed, the alarm cleared; None when there is none."""
        while self._heap and self._heap[0][0] <= now:
            when, _, step = heapq.heappop(self._heap)
            if step.alarm == when:
                step.alarm = math.inf
                self._armed -= 1
                return step
        return None

    def earliest(self) -> float:
        """The next alarm; ``inf`` when there is none."""
        while self._heap and self._heap[0][2].alarm != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

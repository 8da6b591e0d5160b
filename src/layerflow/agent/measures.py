"""What finished steps took, worked out a moment after their end."""

from __future__ import annotations

import threading
import time
from collections import deque

from layerflow.agent.advisor import Advisor
from layerflow.agent.step import Step
from layerflow.agent.values import Measured
from layerflow.observe.trace import StepTrace, figures
from layerflow.wire.messages import Figures

KEPT_STEPS = 64

PATIENCE_S = 1e-3
"""Figures take the interpreter some 0.5 ms, which whoever waits for the step's end needs first."""


class Measures:
    """The last finished steps: their traces and their figures. Thread-safe.

    :param spans_are_transfers: are the lanes' spans the times of copies? Else of enqueueing them, which say nothing of
        the link.

    :ivar traces: oldest first.
    :ivar measured: oldest first; taken from the left by whoever reports them.
    """

    def __init__(self, advisor: Advisor, spans_are_transfers: bool) -> None:
        self.traces: deque[StepTrace] = deque(maxlen=KEPT_STEPS)
        self.measured: deque[Measured] = deque(maxlen=KEPT_STEPS)
        self._advisor = advisor
        self._spans_are_transfers = spans_are_transfers
        self._ended: deque[tuple[float, Step]] = deque()
        self._lock = threading.Lock()

    def ended(self, step: Step) -> None:
        """A step is over; call before anybody is told."""
        self._ended.append((time.monotonic(), step))

    @property
    def pending(self) -> bool:
        """Are there steps to be worked out?"""
        return bool(self._ended)

    def work_out(self, until: float | None = None) -> list[Figures]:
        """The figures, for the server, of what has ended and was not worked out yet.

        :param until: of what had ended :data:`PATIENCE_S` before, monotonic seconds; None = of everything.
        """
        told = []
        with self._lock:
            while self._ended and (until is None or self._ended[0][0] + PATIENCE_S <= until):
                told.append(self._work_out(self._ended.popleft()[1]))
        return told

    def _work_out(self, step: Step) -> Figures:
        trace = step.finish_trace()
        load, save = figures(trace, "load"), figures(trace, "save")
        self.traces.append(trace)
        self.measured.append(Measured(step.number, load, save))
        if self._spans_are_transfers or step.cargo is not None:
            self._advisor.observe(trace, load, step.work)
        return Figures(
            step.number,
            load.bytes,
            load.transfer_ms / 1e3,
            load.exposed_ms / 1e3,
            save.bytes,
            save.transfer_ms / 1e3,
            save.exposed_ms / 1e3,
        )

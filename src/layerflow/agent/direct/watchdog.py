"""Ends the process when a copy that cannot be called back is under way longer than it may.

A load past the arena writes into engine memory by hardware that nobody here can stop. When its step's waits have failed
the engine writes those blocks itself, so a load that is still under way then would be a silent race. A save that
outlives its lease would write into room that the pool has given to another object. Both end with the process.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

from layerflow.system.threads import OwnedThread

RESTART_S = 0.05
EXIT_STUCK = 83
"""How the process ends."""

log = structlog.get_logger("layerflow.agent")


class _Alarm(NamedTuple):
    due: float
    number: int
    direction: str
    step: int


def end_process() -> None:
    """At once, with nothing cleaned up: the death of the process is what stops the copy."""
    os._exit(EXIT_STUCK)


class Watchdog:
    """One thread, which wakes once for each alarm.

    :param end: what ends the process.
    """

    def __init__(self, end: Callable[[], None] = end_process) -> None:
        self._end = end
        self._alarms: list[_Alarm] = []
        self._numbers = itertools.count()
        self._in_flight: dict[str, tuple[int, int, float]] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = OwnedThread("layerflow-watchdog", self._run, restart_s=RESTART_S).start()

    def expect(self, direction: str, step: int, due: float) -> None:
        """No copy of the step in this direction may be under way at `due`, monotonic seconds."""
        with self._changed:
            heapq.heappush(self._alarms, _Alarm(due, next(self._numbers), direction, step))
            if self._alarms[0].due == due:
                self._changed.notify()

    @contextlib.contextmanager
    def in_flight(self, direction: str, step: int, layer: int) -> Iterator[None]:
        """A copy runs inside; one at a time in each direction."""
        self._in_flight[direction] = step, layer, time.monotonic()
        try:
            yield
        finally:
            del self._in_flight[direction]

    def close(self) -> None:
        """No alarm is heard any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (alarm := self._next()) is not None:
            running = self._in_flight.get(alarm.direction)
            if running is not None and running[0] == alarm.step:
                now = time.monotonic()
                log.critical(
                    "direct_copy_stuck",
                    direction=alarm.direction,
                    step=alarm.step,
                    layer=running[1],
                    under_way_s=round(now - running[2], 3),
                    exit_code=EXIT_STUCK,
                    error="it cannot be called back, and may not run on beside the engine: this process ends",
                )
                self._end()

    def _next(self) -> _Alarm | None:
        """The next alarm, once it is due."""
        with self._changed:
            while not self._closed:
                left = self._alarms[0].due - time.monotonic() if self._alarms else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._alarms)
                self._changed.wait(left)
        return None

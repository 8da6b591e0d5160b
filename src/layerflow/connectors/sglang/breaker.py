"""A circuit breaker for loads: a store whose loads keep failing is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

FAILURES = 3
"""Batches in a row whose loads have failed. Each failed load costs a request, which its client has to repeat."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

log = structlog.get_logger("layerflow.sglang")


class LoadBreaker:
    """Closed: loads are tried. Open: nothing is looked up until the pause is over; then one load decides.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0
        self.reason = ""

    @property
    def open(self) -> bool:
        """Is nothing to be loaded now?"""
        return self._clock() < self._until

    def failed(self, reason: str) -> None:
        """A load has failed."""
        self._failures += 1
        self.reason = reason
        if self._failures < FAILURES:
            return
        self._until = self._clock() + self._pause_s
        log.warning("loads_paused", failures=self._failures, pause_s=self._pause_s, reason=reason)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """A load is in place."""
        if self._failures >= FAILURES:
            log.info("loads_resumed", after_failures=self._failures)
        self._failures, self._pause_s, self._until = 0, FIRST_PAUSE_S, 0.0

"""A circuit breaker: an engine that fails again and again is left alone for a while.

Only what speaks against the engine counts: 5xx, broken connections, silence. A request that it refuses (4xx) does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from layerflow.errors import UpstreamError


class BreakerState(Enum):
    """What an engine is given: all requests, none, or one that tries it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Of one engine. The proxy's event loop owns it.

    :param failures: so many in a row open it.
    :param open_s: how long it stays open before one request may try the engine.
    :param clock: monotonic seconds.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most, self._open_s, self._clock = failures, open_s, clock
        self._failed = 0  #: in a row
        self._until = 0.0  #: open until then; meaningful while `_failed` has reached `_most`
        self._trying = False  #: the one request of the half-open state is on its way

    @property
    def state(self) -> BreakerState:
        if self._failed < self._most:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trying)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around one call to the engine: learns how it ended. A call that is cancelled says nothing of the engine."""
        trial = self.state is BreakerState.HALF_OPEN
        self._trying = self._trying or trial
        try:
            yield
        except UpstreamError as error:
            if error.counts:
                self._failed += 1
                self._until = self._clock() + self._open_s
            elif error.judged:
                self._failed = 0
            raise
        else:
            self._failed = 0
        finally:
            if trial:
                self._trying = False

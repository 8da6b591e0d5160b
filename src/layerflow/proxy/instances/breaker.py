"""A circuit breaker: an engine that fails again and again is left alone for a while.

Only what speaks against the engine counts: 5xx, broken connections, silence. A request that it refuses (4xx) does not.
A 500 may be the request's fault: engines answer so what they did not foresee. One that two engines answer so speaks
against neither, and who has failed in no other way is left alone only while another engine can take requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from layerflow.errors import UpstreamError

_UNFORESEEN = 500


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
        self._unanswered = 0  #: of these, how many were no 500
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

    @property
    def answers(self) -> bool:
        """Whether all that it failed in a row it answered with 500."""
        return not self._unanswered

    def forgive(self) -> None:
        """A failure that was counted was the request's fault."""
        self._failed = max(0, self._failed - 1)

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
                self._unanswered += error.status != _UNFORESEEN
                self._until = self._clock() + self._open_s
            elif error.judged:
                self._failed = self._unanswered = 0
            raise
        else:
            self._failed = self._unanswered = 0
        finally:
            if trial:
                self._trying = False

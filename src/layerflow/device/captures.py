"""While the engine captures a graph, nothing of ours is pinned, makes a stream or attaches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

POLL_S = 0.02


def _never() -> bool:
    return False


class CaptureGate:
    """Lets work through that a capture does not bear, while there is none.

    A capture is told (:meth:`capture`) or seen by the probe. One that is told begins only when no such work is under
    way; one that is merely seen may have begun beside it, and is not disturbed because the thread that works has left
    captures (:meth:`layerflow.device.base.Device.leave_captures`).

    :param probe: does a stream of the engine's capture now? From any thread.
    """

    def __init__(self, probe: Callable[[], bool] = _never) -> None:
        self._probe = probe
        self._condition = threading.Condition()
        self._captures = 0
        self._working = 0

    @property
    def capturing(self) -> bool:
        """Is a graph being captured now?"""
        return self._captures > 0 or self._probe()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """The engine captures in this context, which is entered once no work is under way."""
        with self._condition:
            self._captures += 1
            self._condition.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with self._condition:
                self._captures -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def work(self, given_up: Callable[[], bool] = _never) -> Iterator[bool]:
        """Work in this context is done while nothing is captured, which is waited for.

        :param given_up: asked while it waits.
        :returns: False: it was given up before the capture ended, and is not to be done.
        """
        with self._condition:
            while self.capturing and not given_up():
                self._condition.wait(POLL_S)
            may = not self.capturing
            self._working += may
        try:
            yield may
        finally:
            with self._condition:
                self._working -= may
                self._condition.notify_all()

"""Things to do a little later, or sooner where somebody is about to depend on them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from layerflow.system.threads import OwnedThread

RESTART_S = 0.05
SLEEP_S = 0.05
"""A sleep's longest part."""

log = structlog.get_logger("layerflow.vllm")


class Deferred:
    """Calls in the order in which they were put: each a while after that, on a thread of its own, or by :meth:`flush`.

    :param delay_s: seconds.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()
        # True for each call, False to stop. In C: to wake by a semaphore costs an engine with cold caches 45 us.
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._doing = threading.Lock()
        self._thread = OwnedThread("layerflow-deferred", self._run, restart_s=RESTART_S).start()

    def put(self, call: Callable[[], None]) -> None:
        """Do this later; returns at once."""
        self._calls.append((time.monotonic() + self._delay_s, call))
        self._wakes.put(True)

    def flush(self) -> None:
        """Do now what is held; returns once it is done, by whomever."""
        with self._doing:
            while self._calls:
                self._next()

    def close(self) -> None:
        """Do what is held and stop."""
        self.flush()
        self._wakes.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._wakes.get():
            first = self._first()
            # Not in an event: waiting there takes the engine's GIL. What is flushed meanwhile is not waited for.
            while first is not None and (left_s := first[0] - time.monotonic()) > 0:
                time.sleep(min(left_s, SLEEP_S))
                if self._first() is not first:
                    break
            with self._doing:
                if first is not None and self._first() is first:
                    self._next()

    def _first(self) -> tuple[float, Callable[[], None]] | None:
        """What is next; None where all was flushed."""
        try:
            return self._calls[0]
        except IndexError:
            return None

    def _next(self) -> None:
        _, call = self._calls.popleft()
        try:
            call()
        except Exception:
            log.exception("deferred_failed")

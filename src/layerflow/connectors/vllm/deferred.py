"""One thing to do a little later, or sooner where somebody is about to depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("layerflow.vllm")


class Deferred:
    """Holds at most one call. Done after `delay_s` on a thread of its own, or by :meth:`flush` before.

    :param delay_s: seconds.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._call: Callable[[], None] | None = None
        self._due = 0.0
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layerflow-deferred", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Do this later; what was still held is done now."""
        self.flush()
        with self._condition:
            self._call, self._due = call, time.monotonic() + self._delay_s
            self._condition.notify()

    def flush(self) -> None:
        """Do now what is held; returns once it is done, by whomever."""
        with self._condition:
            call, self._call = self._call, None
            if call is not None:
                call()

    def close(self) -> None:
        """Do what is held and stop."""
        self.flush()
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._closing:
                left = self._due - time.monotonic()
                if self._call is None or left > 0:
                    self._condition.wait(left if self._call is not None else None)
                    continue
                call, self._call = self._call, None
                try:
                    call()
                except Exception:
                    log.exception("deferred_failed")

"""The check thread: is the pool alive? It tells the server of every change."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from layerflow.hosts.backend import Backend, Unreachable, Unusable
from layerflow.hosts.lanes.lane import describe, log
from layerflow.system.threads import OwnedThread

PERIOD_S = 0.5


class HealthCheck:
    """Looks after the backend once it is attached.

    :param down: told why it cannot be used.
    :param up: told that it can again.
    :param over: told why it never will, in this process.
    """

    def __init__(
        self,
        backend: Backend,
        down: Callable[[str], None],
        up: Callable[[], None],
        over: Callable[[str], None],
    ) -> None:
        self._backend, self._down, self._up, self._over = backend, down, up, over
        self._changed = threading.Condition()
        self._suspected = self._stopping = False
        self._thread = OwnedThread("layerflow-check", self._run, restart_s=PERIOD_S)
        self.reason = ""  #: why it is down; empty = it is up
        self.statistics: dict[str, float] = {}  #: the latest
        self.began = math.inf  #: when the check that is under way began, on the monotonic clock
        self._statistics_fail = False

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def suspect(self) -> None:
        """A call found it out of reach: look now. Any thread."""
        with self._changed:
            self._suspected = True
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """Whether the thread has ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        return self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self.began = time.monotonic()
            try:
                self._look()
            except Unusable as error:
                self._over(str(error))
                return
            self.began = math.inf
            with self._changed:
                if not self._suspected and not self._stopping:
                    self._changed.wait(PERIOD_S)
                if self._stopping:
                    return
                self._suspected = False

    def _look(self) -> None:
        try:
            self._backend.check()
            reason = ""
        except Unusable:
            raise
        except Unreachable as error:
            reason = str(error) or "it does not answer"
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; it counts as down
            reason = describe(error)
            if reason != self.reason:
                log.exception("backend_call_failed", call="check", error=reason)
        if reason != self.reason:
            was, self.reason = self.reason, reason
            if reason:
                self._down(reason)
            elif was:
                self._up()
        self._count()

    def _count(self) -> None:
        try:
            self.statistics = self._backend.statistics()
            self._statistics_fail = False
        except Exception as error:  # noqa: BLE001 - figures are not worth a failure; told once, not twice a second
            if not self._statistics_fail:
                log.exception("backend_call_failed", call="statistics", error=describe(error))
            self._statistics_fail = True

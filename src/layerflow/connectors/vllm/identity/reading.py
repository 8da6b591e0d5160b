"""Reads weights on a thread of its own: no start, and no request, waits long for their digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from layerflow.errors import ConfigError
from layerflow.system.threads import OwnedThread

START_WAIT_S = 10.0
"""How long a start waits for the digest of its weights. Later, the engine shares nothing until that is known."""

JOIN_S = 2.0
"""How long a shutdown waits for the reader to leave its present file."""

Found = TypeVar("Found")


class WeightsReading(Generic[Found]):
    """Calls `read` on a thread of its own.

    :param read: takes an event that ends it when set.
    """

    def __init__(self, read: Callable[[threading.Event], Found]) -> None:
        self._read = read
        self._stop, self._done = threading.Event(), threading.Event()
        self._found: list[Found] = []
        self._error: ConfigError | None = None
        self._thread = OwnedThread("layerflow-weights", self._run, lost=lambda _: self._done.set()).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False after `timeout_s`."""
        return self._done.wait(timeout_s)

    @property
    def found(self) -> Found:
        """What `read` has returned, once it has ended.

        :raises ConfigError: it found nothing.
        """
        if not self._found:
            raise self._error or ConfigError("the thread that read the weights has failed")
        return self._found[0]

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._found.append(self._read(self._stop))
        except ConfigError as error:
            self._error = error
        self._done.set()

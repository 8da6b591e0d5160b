"""Something that happens to a server in the middle of a step, at any moment of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import MappingProxyType

SLOW_LINK = MappingProxyType(
    {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "8KiB", "transfer__max_inflight_bytes": "64KiB"}
)
"""8 layers of 32 KiB over a link of 4 MB/s: a step's loads take 66 ms, and every moment of it can be hit."""


class Fault:
    """Happens some time after it was let go, on a thread of its own.

    :ivar at: when, on the monotonic clock; 0 = it has not happened yet.
    """

    def __init__(self, work: Callable[[], object], delay_s: float) -> None:
        self._work, self._delay_s = work, delay_s
        self._go, self._never = threading.Event(), threading.Event()
        self.at = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def go(self) -> None:
        self._go.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        self._go.wait()
        self._never.wait(self._delay_s)
        self.at = time.monotonic()
        self._work()

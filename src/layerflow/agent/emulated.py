"""An emulated link: how long bytes would take on a slower link than this machine's memory.

Bytes pass one after the other at `gbps` gigabytes (10^9 bytes) per second, each batch `latency` later;
the schedule is absolute, so that late wake-ups do not add up.
"""

from __future__ import annotations

import threading
import time


class EmulatedLink:
    """One direction of a link.

    :param gbps: 0 = no emulation, everything arrives at once.
    :param latency_us: added to each batch; batches behind each other overlap it.
    """

    def __init__(self, gbps: float, latency_us: int) -> None:
        self.emulated = gbps > 0
        self._seconds_per_byte = 1 / (gbps * 1e9) if gbps > 0 else 0.0
        self._latency = latency_us / 1e6
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def send(self, nbytes: int) -> tuple[float, float]:
        """Put bytes on the link now: when they begin to pass and when the last one has arrived."""
        now = time.monotonic()
        if not self.emulated:
            return now, now
        with self._lock:
            began = max(now, self._busy_until)
            self._busy_until = began + nbytes * self._seconds_per_byte
            return began, self._busy_until + self._latency

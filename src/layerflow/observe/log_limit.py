"""A bound on log lines that a client can cause."""

from __future__ import annotations

LINES_PER_S = 20


class LogLimit:
    """At most :data:`LINES_PER_S` lines a second: a client that sends nonsense must not fill the disk with them."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._left_out = 0

    def admit(self, now: float) -> int | None:
        """May a line be written at `now` (seconds)? None = no; else how many were left out since the last one."""
        if int(now) != self._second:
            self._second, self._written = int(now), 0
        if self._written >= LINES_PER_S:
            self._left_out += 1
            return None
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        return left_out

"""Keeps a client that sends nonsense from filling the disk with log lines."""

from __future__ import annotations

PER_SECOND = 20


class LogLimit:
    """At most :data:`PER_SECOND` lines a second; says how many were left out."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._left_out = 0

    def admit(self, now: float) -> int | None:
        """May a line be written at `now` (seconds)? None = no; else how many were left out since the last one."""
        if int(now) != self._second:
            self._second, self._written = int(now), 0
        if self._written >= PER_SECOND:
            self._left_out += 1
            return None
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        return left_out

"""A bound on log lines that a client can cause."""

from __future__ import annotations

LINES_PER_S = 20
SOURCE_S = 10.0
"""One source's lines are so far apart, in seconds."""
_MAX_SOURCES = 1024


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


class SourceLogLimit:
    """One line in :data:`SOURCE_S` about each process or host, and the bound of :class:`LogLimit` about all of them."""

    def __init__(self) -> None:
        self._all = LogLimit()
        self._written: dict[str, float] = {}  # when a line about each source was last written, longest ago first
        self._left_out: dict[str, int] = {}

    def admit(self, now: float, source: str) -> int | None:
        """May a line about `source` be written? None = no; else how many were left out since the last one about it."""
        last = self._written.get(source)
        if last is not None and now - last < SOURCE_S:
            self._left_out[source] = self._left_out.get(source, 0) + 1
            return None
        others = self._all.admit(now)
        if others is None:
            return None
        self._written.pop(source, None)
        self._written[source] = now
        if len(self._written) > _MAX_SOURCES:
            forgotten = next(iter(self._written))
            del self._written[forgotten]
            self._left_out.pop(forgotten, None)
        return others + self._left_out.pop(source, 0)

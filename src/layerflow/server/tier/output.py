"""What a host prints, as structured logs. Native libraries are chatty: there is a limit."""

from __future__ import annotations

import asyncio
import json
import os
from typing import IO, Any

import structlog

from layerflow.observe.logs import LEVELS

WINDOW_S = 10.0
WINDOW_LINES = 200
"""So many lines in each window are logged; of the rest only the number."""

LINE_CHARS = 2000
RECORD_BYTES = 64 << 10
"""The longest line that is kept whole until its end comes: our own ones carry traces."""
_READ_BYTES = 1 << 16
_LAST_READS = 16  # what a dead process may have left in a pipe: 64 KiB, or 1 MiB where somebody enlarged it
_OURS = ("timestamp", "level", "event", "logger")

log = structlog.get_logger("layerflow.server.tier.output")


class Throttle:
    """Counts lines over all streams of one host, through all its processes."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lines = self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def admit(self) -> bool:
        """Whether one more line may be logged."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.close)
        self._lines += 1
        if self._lines > WINDOW_LINES:
            self._dropped += 1
        return self._lines <= WINDOW_LINES

    def close(self) -> None:
        """The window ends."""
        if self._dropped:
            log.warning("host_output_dropped", backend=self._backend, lines=self._dropped, seconds=WINDOW_S)
        self._lines = self._dropped = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Output:
    """One stream of one process, read on the running loop.

    :param pipe: owned, closed at its end.
    :param stream: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, pipe: IO[bytes], backend: str, pid: int, stream: str, throttle: Throttle) -> None:
        self._pipe = pipe
        self._names: dict[str, Any] = {"backend": backend, "pid": pid}
        self._stream = stream
        self._throttle = throttle
        self._pending = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe, self._read)

    def close(self) -> None:
        """Its process is dead: log what it left. A child of it that lives on writes to nobody."""
        for _ in range(_LAST_READS):
            if not self._read():
                break
        if not self._pipe.closed:
            self._end()

    def _read(self) -> bool:
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        if len(rest) > RECORD_BYTES:
            lines.append(rest)
            rest = bytearray()
        self._pending = rest
        for line in lines:
            self._say(bytes(line))
        return True

    def _end(self) -> None:
        self._loop.remove_reader(self._pipe)
        self._pipe.close()
        rest, self._pending = bytes(self._pending), bytearray()
        self._say(rest)

    def _say(self, line: bytes) -> None:
        if not line.strip() or not self._throttle.admit():
            return
        record = _own_record(line)
        if record is not None:
            fields = {name: value for name, value in record.items() if name not in _OURS and name not in self._names}
            getattr(log, record["level"])(record["event"], logged_by=record["logger"], **self._names, **fields)
            return
        text = line.decode("utf-8", "replace").rstrip()[:LINE_CHARS]
        log.info("host_output", **self._names, stream=self._stream, line=text)


def _own_record(line: bytes) -> dict[str, Any] | None:
    """A line that layerflow's own logging wrote in the host, decoded; None for any other."""
    if not line.startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    level, event, logger = (record.get(name) for name in ("level", "event", "logger"))
    ours = isinstance(logger, str) and logger.startswith("layerflow.") and isinstance(event, str) and level in LEVELS
    return record if ours else None

"""One log output for the ``layerflow`` process: structlog's events and everything that logs through stdlib.

Every line is one event: a name, the ids it concerns as fields, level, logger and an ISO timestamp in UTC.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO, get_args

import structlog

from layerflow.errors import ConfigError
from layerflow.expiring import ExpiringSet

Format = Literal["console", "json"]
LEVELS = ("debug", "info", "warning", "error", "critical")

_FOREIGN = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
# Constant, because loggers cache their processors at first use: reconfiguring changes only the handler.
_NATIVE: list[structlog.typing.Processor] = [
    structlog.stdlib.filter_by_level,
    *_SHARED,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]


def configure(level: str = "info", fmt: str = "console", stream: TextIO | None = None) -> None:
    """Send every log line of this process to `stream`; may be called again to change level or format.

    It takes over the root logger, so only the ``layerflow`` process calls it: in embedded mode logging
    belongs to the engine. Run uvicorn with ``log_config=None``, or it installs its own handlers again.

    :param level: the lowest level shown, one of :data:`LEVELS`.
    :param fmt: ``"console"`` for people (coloured on a terminal) or ``"json"``, one object per line.
    :param stream: text stream; standard error by default.
    :raises ConfigError: for an unknown level or format.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    if fmt not in get_args(Format):
        raise ConfigError(f"log format {fmt!r} is unknown; use one of {', '.join(get_args(Format))}")
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(fmt, colors=target.isatty()))

    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(logging.NOTSET)
    # It reports every change it sees, a log file beside the watched one included: each line would cause the next.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    # A line for each request that the proxy sends, and each probe.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=_NATIVE,
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _formatter(fmt: str, *, colors: bool) -> logging.Formatter:
    final: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, _readable]
    if fmt == "json":
        final.append(structlog.processors.format_exc_info)
        final.append(structlog.processors.JSONRenderer(serializer=json.dumps, default=repr, skipkeys=True))
    else:
        plain = structlog.dev.plain_traceback  # the rich one prints local variables, secrets included
        final.append(structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain))
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()], processors=final
    )


def _readable(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Time, level and event first; keys and digests as hex, as every other place prints them."""
    event.pop("color_message", None)  # uvicorn's second copy of its message
    ordered = {field: event.pop(field) for field in ("timestamp", "level", "event") if field in event}
    ordered.update((field, value.hex() if isinstance(value, bytes) else value) for field, value in event.items())
    return ordered


# A bound on log lines that a client can cause.


LINES_PER_S = 20
SOURCE_S = 10.0
"""One source's lines are so far apart, in seconds."""
_MAX_SOURCES = 1024


class LogRateLimiter:
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
    """One line in :data:`SOURCE_S` about each process or host; about all of them, as :class:`LogRateLimiter` has it."""

    def __init__(self) -> None:
        self._all = LogRateLimiter()
        self._written: ExpiringSet[str] = ExpiringSet(_MAX_SOURCES)  #: sources of which a line was just written
        self._left_out: dict[str, int] = {}

    def admit(self, now: float, source: str) -> int | None:
        """May a line about `source` be written? None = no; else how many were left out since the last one about it."""
        if self._written.holds(source, now):
            self._left_out[source] = self._left_out.get(source, 0) + 1
            return None
        others = self._all.admit(now)
        if others is None:
            return None
        forgotten = self._written.add(source, now + SOURCE_S)
        if forgotten is not None:
            self._left_out.pop(forgotten, None)
        return others + self._left_out.pop(source, 0)

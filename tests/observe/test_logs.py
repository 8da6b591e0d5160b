from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import structlog

from layerflow.errors import ConfigError
from layerflow.observe.logs import configure

log = structlog.get_logger("layerflow.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_one_json_line_per_event(out: io.StringIO) -> None:
    configure("info", "json", out)
    log.info("step_done", session=3, step=17)
    log.warning("batch_failed", session=3, batch=4, reason="a\nb")
    first, second = lines(out)
    assert (first["event"], first["session"], first["step"], first["level"]) == ("step_done", 3, 17, "info")
    assert first["logger"] == "layerflow.test"
    assert (second["event"], second["reason"]) == ("batch_failed", "a\nb")


def test_time_is_iso_and_utc(out: io.StringIO) -> None:
    configure("info", "json", out)
    log.info("started")
    assert datetime.fromisoformat(lines(out)[0]["timestamp"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "anything"])
def test_stdlib_loggers_share_the_output(out: io.StringIO, name: str) -> None:
    foreign = logging.getLogger(name)
    own = io.StringIO()
    foreign.addHandler(logging.StreamHandler(own))
    try:
        configure("info", "json", out)
        foreign.info("listening on %s", "port 1", extra={"color_message": "\x1b[1mlistening"})
        (line,) = lines(out)
    finally:
        foreign.handlers.clear()
    assert (line["event"], line["logger"], line["level"]) == ("listening on port 1", name, "info")
    assert "color_message" not in line
    assert name == "anything" or own.getvalue() == "", "its own handler would say it twice"


def test_exceptions_stay_on_one_line(out: io.StringIO) -> None:
    configure("info", "json", out)
    secret = "hunter2-" + "local"
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("lane_survived", lane="h2d")
        logging.getLogger("asyncio").exception("task failed")
    native, foreign = lines(out)
    assert "ValueError: broken" in native["exception"]
    assert "ValueError: broken" in foreign["exception"]
    assert secret not in out.getvalue()


def test_console_tracebacks_do_not_print_locals(out: io.StringIO) -> None:
    configure("info", "console", out)
    secret = "hunter2-" + "local"
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("lane_survived", lane="h2d")
    assert "ValueError: broken" in out.getvalue()
    assert secret not in out.getvalue()
    assert "\x1b[" not in out.getvalue(), "no colours where nobody sees them"


def test_level_and_format_change_while_loggers_live(out: io.StringIO) -> None:
    configure("info", "json", out)
    log.debug("hidden")
    configure("debug", "json", out)
    log.debug("shown")
    configure("error", "json", out)
    log.warning("hidden_again")
    assert [line["event"] for line in lines(out)] == ["shown"]
    later = io.StringIO()
    configure("info", "console", later)
    log.info("plain", session=1)
    assert "plain" in later.getvalue() and "session=1" in later.getvalue()
    assert len(lines(out)) == 1, "the old stream is left alone"


def test_bytes_are_hex_and_strangers_are_repr(out: io.StringIO) -> None:
    configure("info", "json", out)
    log.info("object_hidden", key=b"\x01\xff", what={1, 2})
    (line,) = lines(out)
    assert line["key"] == "01ff"
    assert line["what"] == "{1, 2}"


def test_warnings_are_events(out: io.StringIO) -> None:
    configure("info", "json", out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("deprecated thing", stacklevel=1)
    # Garbage of earlier tests may warn meanwhile, too.
    (line,) = (line for line in lines(out) if "deprecated thing" in line["event"])
    assert line["logger"] == "py.warnings"


@pytest.mark.parametrize(("level", "fmt", "named"), [("loud", "json", "loud"), ("info", "xml", "xml")])
def test_unknown_settings_are_refused_before_anything_changes(level: str, fmt: str, named: str) -> None:
    before = logging.getLogger().handlers[:]
    with pytest.raises(ConfigError, match=named):
        configure(level, fmt)
    assert logging.getLogger().handlers == before

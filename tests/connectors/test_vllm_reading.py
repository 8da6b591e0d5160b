"""Weights are read behind an engine's start."""

from __future__ import annotations

import threading

import pytest

from layerflow.connectors.vllm.identity.reading import WeightsReading
from layerflow.errors import ConfigError

PATIENCE_S = 20.0


def test_a_start_waits_no_longer_than_it_is_told() -> None:
    go = threading.Event()
    reading = WeightsReading(lambda _: go.wait(PATIENCE_S) and "content")
    assert not reading.wait(0)
    go.set()
    assert reading.wait(PATIENCE_S) and reading.found == "content"


def test_weights_that_cannot_be_read_are_told_to_who_asks() -> None:
    def read(_: threading.Event) -> str:
        raise ConfigError("the disk is gone")

    reading = WeightsReading(read)
    assert reading.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="disk is gone"):
        _ = reading.found


def test_an_error_that_is_nobodys_ends_the_wait() -> None:
    def read(_: threading.Event) -> str:
        raise ZeroDivisionError

    reading = WeightsReading(read)
    assert reading.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="failed"):
        _ = reading.found


def test_a_shutdown_ends_it() -> None:
    seen = threading.Event()
    reading = WeightsReading(lambda stop: seen.set() or stop.wait(PATIENCE_S))
    assert seen.wait(PATIENCE_S)
    reading.close()
    assert reading.found is True

"""A vLLM with and without layerflow, and layerflow's own processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine

from layerflow_cli.bench.harness import ServerProcess


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``layerflow run`` processes; all are stopped at the end. ``pool__size=...`` is ``pool.size``."""
    servers: list[ServerProcess] = []

    def start(**settings: object) -> ServerProcess:
        named = {"pool.size": "256MiB"} | {key.replace("__", "."): value for key, value in settings.items()}
        servers.append(ServerProcess(named))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Start vLLM processes: ``vllm(model, **arguments of LLM)``; all are ended at the end."""
    engines: list[Engine] = []
    numbers = itertools.count()

    def start(model: str, **arguments: Any) -> Engine:
        engines.append(Engine(model, tmp_path / f"vllm-{next(numbers)}.log", **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """A vLLM without layerflow per model and arguments, kept for all tests of a file: what tokens must be."""
    engines: list[Engine] = []

    @functools.cache
    def start(model: str, **arguments: Any) -> Engine:
        engines.append(Engine(model, tmp_path_factory.mktemp("plain") / "vllm.log", **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()

"""Prefill and decode engines apart, real vLLMs, and layerflow's servers between them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "vllm"))  # its engines, models and prompts

from engines import Engine

from layerflow_cli.bench.harness import ServerProcess


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``layerflow run`` processes; all are stopped at the end. ``pool__size=...`` is ``pool.size``."""
    servers: list[ServerProcess] = []

    def start(**settings: object) -> ServerProcess:
        named = {"pool.size": "256MiB", "pd.handoff_lease_s": 5.0}
        named |= {key.replace("__", "."): value for key, value in settings.items()}
        servers.append(ServerProcess(named))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Start vLLM processes: ``vllm(model, **arguments of LLM)``; all are ended at the end."""
    engines: list[Engine] = []
    folder, numbers = tmp_path_factory.mktemp("vllm"), itertools.count()

    def start(model: str, **arguments: Any) -> Engine:
        engines.append(Engine(model, folder / f"vllm-{next(numbers)}.log", **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def plain(vllm: Callable[..., Engine]) -> Callable[..., Engine]:
    """A vLLM without layerflow per model and arguments: what tokens must be."""

    @functools.cache
    def start(model: str, **arguments: Any) -> Engine:
        return vllm(model, **arguments)

    return start

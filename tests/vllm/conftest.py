"""A vLLM with and without layerflow, and layerflow's own processes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, close

from layerflow_cli.bench.harness import ServerProcess

MOST_REFERENCES = 4
"""Of vLLMs that are kept without a test that uses them: each takes some hundred MiB."""

Key = tuple[str, tuple[tuple[str, Any], ...]]
"""A model and the arguments of its vLLM."""


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``layerflow run`` processes; all are stopped at the end. ``pool__size=...`` is ``pool.size``."""
    servers: list[ServerProcess] = []

    def start(**settings: object) -> ServerProcess:
        # What a busy machine takes for a step's loads is no finding.
        patient = {"pool.size": "256MiB", "transfer.step_timeout_ms": 60_000}
        named = patient | {key.replace("__", "."): value for key, value in settings.items()}
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
    close(engines)


@pytest.fixture(scope="session")
def references() -> Iterator[OrderedDict[Key, Engine]]:
    """The vLLMs of :func:`plain` that live; the one that was asked for last is the last."""
    engines: OrderedDict[Key, Engine] = OrderedDict()
    yield engines
    close(engines.values())


@pytest.fixture(scope="module")
def plain(references: OrderedDict[Key, Engine], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """A vLLM without layerflow per model and arguments: what tokens must be.

    It goes on from file to file, and each finds its prefix cache empty.
    """
    known: set[Key] = set()

    def start(model: str, **arguments: Any) -> Engine:
        key = (model, tuple(sorted(arguments.items())))
        if key in references and not references[key].process.is_alive():
            del references[key]
        if key not in references:
            if len(references) == MOST_REFERENCES:
                references.popitem(last=False)[1].close()
            references[key] = Engine(model, tmp_path_factory.mktemp("plain") / "vllm.log", **arguments)
        elif key not in known:
            references[key].reset()
        known.add(key)
        references.move_to_end(key)
        return references[key]

    return start

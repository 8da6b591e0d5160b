"""End-to-end tests: real processes, real sockets, real kills.

Each test exists in a short form, which `make test` runs, and a long one behind the marker `campaign`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from layerflow_cli.bench.harness import ServerProcess


@pytest.fixture(autouse=True)
def _forked(forked_servers: None) -> None: ...


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``layerflow run`` processes; all are stopped at the end. ``pool__size=...`` is ``pool.size``."""
    servers: list[ServerProcess] = []

    def start(**settings: object) -> ServerProcess:
        named = {"pool.size": "16MiB"} | {key.replace("__", "."): value for key, value in settings.items()}
        servers.append(ServerProcess(named))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

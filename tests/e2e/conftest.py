"""End-to-end tests: real processes, real sockets, real kills.

Each test exists in a short form, which `make test` runs, and a long one behind the marker `campaign`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from e2e.patience import patient_clients
from layerflow_cli.bench.harness import ServerProcess

PATIENT = {
    "pool.size": "16MiB",
    "pool.lookup_timeout_ms": 10_000,
    "server.liveness_ms": 30_000,
    "transfer.step_timeout_ms": 60_000,
    "transfer.save_timeout_ms": 60_000,
}


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with patient_clients():
        yield


@pytest.fixture(autouse=True)
def _forked(forked_servers: None) -> None: ...


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``layerflow run`` processes; all are stopped at the end. ``pool__size=...`` is ``pool.size``.

    They and their clients wait long for each other, as any process of a busy machine may stand still.
    """
    servers: list[ServerProcess] = []

    def start(**settings: object) -> ServerProcess:
        named = PATIENT | {key.replace("__", "."): value for key, value in settings.items()}
        servers.append(ServerProcess(named))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

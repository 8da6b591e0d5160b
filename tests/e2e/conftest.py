"""End-to-end tests: real processes, real sockets, real kills.

Each test exists in a short form, which `make test` runs, and a long one behind the marker `campaign`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from layerflow_cli.bench.harness import ServerProcess


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "campaign: the long form of an end-to-end test; run with `-m campaign`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long forms out unless they were asked for."""
    if "campaign" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("campaign")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("campaign")]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

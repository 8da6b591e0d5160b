"""SGLang servers with layerflow's linker, and layerflow's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import Engine
from servers import A, B, Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts SGLang servers and ``layerflow run``; all are ended at the end."""
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture
def pair(servers: Servers) -> list[Engine]:
    """Two servers of the same model on one ``layerflow run``, their own caches empty."""
    servers.serve()
    return servers.start(A, B)


@pytest.fixture
def new_pair(servers: Servers) -> list[Engine]:
    """A pair on a ``layerflow run`` that has nothing."""
    servers.stop_serving()
    servers.serve()
    return servers.start(A, B)

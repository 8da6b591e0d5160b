"""Fixtures of the tests of the memcache backend: one MetaService a module, clients in processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from memcache_client import RemoteMemcache
from meta_service import MB, MetaService

from layerflow.hosts.backend import Unreachable
from layerflow.system.memfd import SharedMemory
from layerflow_testing import ARENA, Client

MEMORY = 64 * MB
JOIN_S = 60.0

Join = Callable[..., Client]


@pytest.fixture(scope="module")
def meta(protocol) -> Iterator[MetaService]:
    """One for each protocol: who joins after others have left may wait a minute."""
    with MetaService() as meta:
        yield meta


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    with SharedMemory.create(ARENA) as arena:
        yield arena


@pytest.fixture(scope="module", params=["host_shm", "host_tcp"])
def protocol(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def join(meta, arena, protocol) -> Iterator[Join]:
    """Attach clients, each in a process of its own; all are closed at the end."""
    made: list[RemoteMemcache] = []

    def attach(patches: Sequence[tuple[str, str, object]] = (), **options: object) -> Client:
        made.append(RemoteMemcache(meta.options(protocol=protocol, **options), arena, patches))
        limit = time.monotonic() + JOIN_S
        while True:
            try:
                made[-1].attach(arena, lambda keys: None)
            except Unreachable:  # as a host does: the pool may not let a client in while another one leaves
                if time.monotonic() > limit:
                    raise
            else:
                return Client(made[-1], made[-1].address)

    yield attach
    for one in reversed(made):
        assert one.end() in (0, -signal.SIGKILL, -signal.SIGTERM)

"""Fixtures of the tests of the memcache backend: one MetaService a module, clients in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
from backends.backend_contract import ARENA, Client
from memcache_client import RemoteMemcache
from meta_service import MB, MetaService

from layerflow.memfd import SharedMemory

MEMORY = 64 * MB

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
        made[-1].attach(arena, lambda keys: None)
        return Client(made[-1], made[-1].address)

    yield attach
    for one in reversed(made):
        assert one.end() in (0, -signal.SIGKILL, -signal.SIGTERM)

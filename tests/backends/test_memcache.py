"""The memcache backend against the real packages and a real MetaService. CANN emulated: no NPU takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from backends.backend_contract import ARENA, BackendContract, Bench, Client
from memcache_client import RemoteMemcache
from meta_service import MB, MetaService

from layerflow.memfd import SharedMemory

MEMORY = 64 * MB

Join = Callable[..., Client]


@pytest.fixture(scope="module")
def meta() -> Iterator[MetaService]:
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

    def attach(**options: object) -> Client:
        made.append(RemoteMemcache(meta.options(protocol=protocol, **options), arena))
        made[-1].attach(arena, lambda keys: None)
        return Client(made[-1], made[-1].address)

    yield attach
    for one in reversed(made):
        assert one.end() in (0, -9)


@pytest.fixture(scope="module")
def clients(join) -> tuple[Client, Client]:
    """An owner of memory and a pure client. Shared, because closing one takes seconds."""
    return join(dram_size=MEMORY), join()


class TestMemcache(BackendContract):
    @pytest.fixture
    def bench(self, clients, arena) -> Bench:
        return Bench(*clients, arena, MEMORY)

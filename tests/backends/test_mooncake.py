"""The Mooncake backend against the real package and a real master."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from backends.backend_contract import ARENA, BackendContract, Bench, Client
from mooncake_master import MooncakeMaster

from layerflow.hosts.mooncake import Mooncake
from layerflow.memfd import SharedMemory

SEGMENT = 64 << 20
TIMEOUT_MS = 2500


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster(default_kv_lease_ttl=3000) as master:
        yield master


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    with SharedMemory.create(ARENA) as arena:
        yield arena


@pytest.fixture
def join(arena) -> Iterator[Callable[..., Client]]:
    """Attach clients to a master; all are closed at the end."""
    backends: list[Mooncake] = []

    def attach(master: MooncakeMaster, **options: object) -> Client:
        given = {"master": master.address, "metrics": master.url, "segment_size": 0, "timeout_ms": TIMEOUT_MS} | options
        backends.append(Mooncake(given))
        backends[-1].attach(arena, lambda keys: None)
        return Client(backends[-1], arena.address)

    yield attach
    for backend in reversed(backends):
        backend.close()


class TestMooncake(BackendContract):
    @pytest.fixture
    def bench(self, master, arena, join) -> Bench:
        """An owner of a segment and a pure client."""
        return Bench(join(master, segment_size=SEGMENT), join(master), arena, SEGMENT)

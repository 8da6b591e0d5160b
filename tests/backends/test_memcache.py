"""The memcache backend against the real packages and a real MetaService. CANN emulated: no NPU takes part."""

from __future__ import annotations

import pytest
from memcache_fixtures import MEMORY, arena, join, meta, protocol

from layerflow_testing import BackendContract, Bench, Client

__all__ = ["arena", "join", "meta", "protocol"]  # fixtures


@pytest.fixture(scope="module")
def clients(join) -> tuple[Client, Client]:
    """An owner of memory and a pure client. Shared, because closing one takes seconds."""
    return join(dram_size=MEMORY), join()


class TestMemcache(BackendContract):
    @pytest.fixture
    def bench(self, clients, arena) -> Bench:
        return Bench(*clients, arena, MEMORY)

"""What a memcache writer makes of a client that forgets addresses: no packages, no pool."""

from __future__ import annotations

import time
from typing import Any

import pytest
import xxhash

from layerflow.hosts.backend import OK, ObjectLocation, ObjectStatus
from layerflow.hosts.memcache.backend import MemcacheWriter
from layerflow.hosts.memcache.client import ObjectInfo
from layerflow.objects import HEADER_BYTES, pack_header, set_checksum
from layerflow.system.memfd import SharedMemory

GVA, INVALID = 1 << 40, -3102
KEY = bytes(range(24))


class Pool:
    """One client and all of the pool: one object. `table`: the client can copy from and to its address."""

    generation = 1

    def __init__(self) -> None:
        self.header = b""
        self.nbytes = 0
        self.table = self.sweeps = False
        self.leased = self.removed = 0

    def reach(self) -> int:
        return self.generation

    def largest_segment(self) -> int:
        return 0

    def info(self, names: list[str], *, complete: bool) -> list[ObjectInfo]:
        return [ObjectInfo(self.nbytes, GVA if self.nbytes else 0) for _ in names]

    def remembers(self, name: str) -> bool:
        return False

    def allocate(self, names: list[str], sizes: list[int], ttl_ms: int) -> list[int]:
        for size in sizes:
            self.nbytes, self.table = size, True
        return [GVA for _ in names]

    def copy(self, spans: list[Any], direction: int, until: float) -> list[int]:
        return [0 if self.table else INVALID for _ in spans]

    def finish(self, names: list[str]) -> list[int]:
        self.table = not self.sweeps
        return [0 for _ in names]

    def lease(self, names: list[str], ttl_ms: int) -> list[int]:
        self.table, self.leased = True, self.leased + len(names)
        return [0 for _ in names]

    def unlease(self, names: list[str]) -> None:
        self.leased -= len(names)

    def remove(self, names: list[str]) -> list[int]:
        self.removed += len(names)
        return [0 for _ in names]

    def count(self, name: str, by: int = 1) -> None:
        """Not of interest."""

    # The scratch memory's:

    def blank(self, gvas: list[int], until: float) -> list[int]:
        return [0 for _ in gvas]

    def read(self, gvas: list[int], until: float) -> list[tuple[int, bytes]]:
        return [(0, self.header) if self.table else (INVALID, b"") for _ in gvas]


@pytest.mark.parametrize("sweeps", [False, True])
@pytest.mark.parametrize("arrived", [True, False])
def test_what_is_published_is_read_back_whatever_the_client_has_forgotten(sweeps, arrived):
    pool = Pool()
    pool.sweeps = sweeps
    with SharedMemory.create(4096) as arena:
        writer = MemcacheWriter(pool, pool)  # type: ignore[arg-type]
        writer.scratch, writer.arena = pool, arena  # type: ignore[assignment]
        place = ObjectLocation(KEY, 0, arena.address, 1024, 1, 1)
        header = memoryview(bytearray(pack_header(KEY, blocks=1, tokens=16, payload=1024)))
        arena.view[:HEADER_BYTES] = header
        until = time.monotonic() + 5
        assert writer.open([place], until) == writer.write([place], 0, 1, until) == [OK]
        set_checksum(header, xxhash.xxh3_64_intdigest(bytes(1024)))
        pool.header = bytes(header) if arrived else bytes(HEADER_BYTES)
        [result] = writer.commit([place], until)
    assert result.outcome is (ObjectStatus.OK if arrived else ObjectStatus.FAILED)
    assert pool.removed == (not arrived) and pool.leased == 0

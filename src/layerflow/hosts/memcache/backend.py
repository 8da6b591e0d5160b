"""memcache_hybrid behind the arena: one object a chunk, its layers copied by address within it.

Needs packages with leases and addresses (1.3). How many calls reach the MetaService does not depend on the number of
layers: a write is a look, an allocation and a look, and the publication; a fetch a lease and a look. What is known of
the library, and what layerflow does about it, is told where it is done: :mod:`.client` (its table of
addresses), :mod:`.reading` (leases), :mod:`.writing` (two writers of one key).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerflow.hosts.backend import BackendInfo, Unreachable, pool_name
from layerflow.hosts.memcache.client.client import MemcacheClient
from layerflow.hosts.memcache.client.codes import explain
from layerflow.hosts.memcache.client.headers import Scratch, reaches_all
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.reading import MemcacheReader
from layerflow.hosts.memcache.setup import MemcacheOptions, connect, shared
from layerflow.hosts.memcache.writing import MemcacheWriter
from layerflow.hosts.shared.store import SharedStore
from layerflow.system.memfd import SharedMemory

JOINS = 3
_COUNTED = (
    "metadata_calls",
    "copy_calls",
    "failed_calls",
    "full_retries",
    "expired_leases",
    "leases_left",
    "failed_revokes",
    "lost_races",
    "abandoned_removed",
    "skipped_writes",
)


class Memcache(SharedStore[MemcacheClient, MemcacheReader, MemcacheWriter]):
    """A client of a pool; with memory of its own (`dram_size`), also one of those who give it memory.

    :param options: of ``[pool.memcache]``; see :class:`MemcacheOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MemcacheOptions.read(options)
        self._shared = shared(self._options)
        meta = MetaService(self._shared.meta_service_url, self._shared.metrics_url)
        calls = MemcacheClient(meta, self._options.timeout_ms / 1e3)
        super().__init__(
            "memcache",
            calls,
            meta,
            MemcacheReader(calls, meta, self._shared.world_size),
            MemcacheWriter(calls, meta),
            _COUNTED,
        )

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        for _ in range(JOINS):
            attached = self._join(arena)
            assert self._reader.scratch is not None
            if reaches_all(self._calls, self._reader.scratch):
                return attached
        raise Unreachable(
            f"memcache: this client joined {JOINS} times, and never reached the memory of all the others; restart what "
            "gives memory to the pool, one by one"
        )

    def check(self) -> None:
        self._service.check(self._calls.probe)
        self._calls.give_back()
        self._reader.correct()

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"meta_services_lost": self._service.lost}

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._service.reach()
        return [code == 1 for code in self._calls.exists([pool_name(key) for key in keys], until)]

    def hide(self, keys: Sequence[bytes]) -> None:
        """Only what is complete: an unfinished one is being written again. Memory under lease is kept until it ends."""
        names = [pool_name(key) for key in keys]
        complete = [name for name, code in zip(names, self._calls.exists(names), strict=True) if code == 1]
        self._calls.remove(complete)

    def _register(self, arena: SharedMemory) -> str:
        code = self._calls.register(arena.address, arena.nbytes)
        return explain(code) if code != 0 else ""

    def _join(self, arena: SharedMemory) -> BackendInfo:
        self._start_over()
        client = connect(self._options, self._service)
        self._use(client.store, arena)
        self._reader.scratch = Scratch(self._calls)
        self._writer.scratch = Scratch(self._calls)
        self._writer.number = client.number
        return BackendInfo(
            {
                "version": client.version,
                "meta_service": self._shared.meta_service_url,
                "number": client.number,
                "protocol": "as in config_file" if self._options.config_file else self._options.protocol,
                "cann": "emulated" if self._options.cann_emulator else "real",
            }
        )

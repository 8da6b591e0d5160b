"""memcache_hybrid behind the arena: one object a chunk, its layers copied by address within it.

Needs packages with leases and addresses (1.3). How many calls reach the MetaService does not depend on the number of
layers: a write is a look, an allocation and a look, and the publication; a fetch a lease and a look. What is known of
the library, and what layerflow does about it, is told where it is done: :mod:`.memcache_calls` (its table of
addresses), :mod:`.memcache_reading` (leases), :mod:`.memcache_writing` (two writers of one key).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerflow.hosts.backend import Backend, BackendInfo, ObjectLocation, ObjectResult, Unreachable, Unusable, pool_name
from layerflow.hosts.memcache.client import MemcacheClient
from layerflow.hosts.memcache.codes import explain
from layerflow.hosts.memcache.headers import Scratch, reaches_all
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.reading import MemcacheReader
from layerflow.hosts.memcache.setup import MemcacheOptions, connect, shared
from layerflow.hosts.memcache.writing import MemcacheWriter
from layerflow.memfd import SharedMemory

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


class Memcache(Backend):
    """A client of a pool; with memory of its own (`dram_size`), also one of those who give it memory.

    :param options: of ``[pool.memcache]``; see :class:`MemcacheOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MemcacheOptions.read(options)
        self._shared = shared(self._options)
        self._meta = MetaService(self._shared.meta_service_url, self._shared.metrics_url)
        self._calls = MemcacheClient(lambda: self._meta.generation)
        self._reader = MemcacheReader(self._calls, self._meta, self._shared.world_size)
        self._writer = MemcacheWriter(self._calls, self._meta)

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
        self._meta.check()
        if self._calls.unlinked:  # it reconnects by itself, within two seconds; ask it
            self._calls.exists([pool_name(bytes(24))])
        self._reader.correct()

    def statistics(self) -> dict[str, float]:
        counts = self._calls.counts
        figures: dict[str, float] = {name: counts.get(name, 0) for name in _COUNTED}
        figures["meta_services_lost"] = self._meta.lost
        return figures

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._meta.reach()
        return [code == 1 for code in self._calls.exists([pool_name(key) for key in keys])]

    def hide(self, keys: Sequence[bytes]) -> None:
        """Only what is complete: an unfinished one is being written again. Memory under lease is kept until it ends."""
        names = [pool_name(key) for key in keys]
        complete = [name for name, code in zip(names, self._calls.exists(names), strict=True) if code == 1]
        self._calls.remove(complete)

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._reader.open(places, until)

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self._reader.fetch(places, lo, hi, until)

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        self._reader.close(places)

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._writer.open(places, until)

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self._writer.write(places, lo, hi, until)

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._writer.commit(places, until)

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        self._writer.revoke(places)

    def close(self) -> None:
        self._leave()

    def _leave(self) -> bool:
        """False: calls of the client do not come back, so it is still there."""
        left = self._calls.close()
        self._reader.forget()
        self._writer.forget()
        self._meta.close()
        return left

    def _join(self, arena: SharedMemory) -> BackendInfo:
        if not self._leave():
            raise Unreachable("memcache: a call of the client before has not come back yet")
        client = connect(self._options, self._meta)
        self._calls.open(client.store)
        code = self._calls.register(arena.address, arena.nbytes)
        if code != 0:
            self.close()
            raise Unusable(
                f"memcache cannot register the arena of {arena.nbytes} bytes ({explain(code)}); raise the limit of "
                "locked memory (ulimit -l)"
            )
        self._reader.scratch = Scratch(self._calls)
        self._writer.scratch = Scratch(self._calls)
        self._writer.arena = arena
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

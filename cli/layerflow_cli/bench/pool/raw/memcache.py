"""Raw calls to memcache_hybrid: room, copies and the end of a write; a lease, places and copies to read."""

from __future__ import annotations

import functools
import time
from typing import Any

from layerflow.hosts.memcache.client import explain
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.setup import MemcacheOptions, connect, shared
from layerflow_cli.bench.pool.raw.plain import Raw, Shape, check_codes

DRAM = 1
G2H, H2G = 2, 3
LEASE_MS = 10_000
SWEEP_S = 1.5
"""So long, at most, every client keeps addresses of what was removed, and can write nothing new there."""
_zero = functools.partial(check_codes, explain)


class RawMemcache(Raw):
    """A client as the host's is: same options, as much memory for the pool."""

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        chosen = MemcacheOptions.read(options)
        common = shared(chosen)
        self._store = connect(chosen, MetaService(common.meta_service_url, common.metrics_url)).store
        _zero([self._store.register_buffer(self.memory.address, self.memory.nbytes)], "register memory")

    def save(self, names: list[str]) -> None:
        store, (objects, layers, nbytes) = self._store, self.shape
        places = store.batch_alloc(names, [layers * nbytes] * objects, DRAM)
        _zero([not place for place in places], "give room")
        self._copy(places, H2G)
        _zero(store.batch_write_finish(names, [0] * objects), "finish a write")

    def load(self, names: list[str]) -> None:
        store = self._store
        _zero(store.batch_add_lease(names, LEASE_MS), "lease")
        self._copy([info.gva_list()[0] for info in store.batch_get_key_info(names)], G2H)
        store.batch_remove_lease(names)

    def forget(self, names: list[str]) -> None:
        _zero(self._store.remove_batch(names), "remove")
        time.sleep(SWEEP_S)

    def close(self) -> None:
        self._store.close()

    def _copy(self, places: list[int], direction: int) -> None:
        objects, layers, nbytes = self.shape
        sizes = [nbytes] * objects
        for layer in range(layers):
            there = [place + layer * nbytes for place in places]
            here = [self.place(index, layer) for index in range(objects)]
            _zero([self._store.batch_copy(there, here, sizes, direction)], "copy")

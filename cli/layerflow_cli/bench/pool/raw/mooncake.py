"""Raw calls to a Mooncake store: put and get sessions, one range of each object per call."""

from __future__ import annotations

import functools
import time
from typing import Any

from layerflow.hosts.mooncake.client import Master, MooncakeOptions, Warming, added, connect, explain, mapped
from layerflow_cli.bench.pool.raw.plain import Raw, Shape, check_codes

WARM_S = 120.0
_zero = functools.partial(check_codes, explain)


class RawMooncake(Raw):
    """A client as the host's is: same options, a segment of the same size, warm."""

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        chosen = MooncakeOptions.read(options)
        before = mapped()
        self._client = connect(chosen, Master(chosen.master, chosen.metrics))
        self._store = self._client.store
        _zero([self._store.register_buffer(self.memory.address, self.memory.nbytes)], "register_buffer")
        if chosen.segment_size:
            warming = Warming(added(before, mapped(), chosen.segment_size), chosen.segment_size)
            until = time.monotonic() + WARM_S
            while warming.warm_bytes < chosen.segment_size and time.monotonic() < until:
                time.sleep(0.02)

    def save(self, names: list[str]) -> None:
        store, (objects, layers, nbytes) = self._store, self.shape
        sizes = [[nbytes]] * objects
        _zero(store.batch_put_session_start(names, [layers * nbytes] * objects, self._client.replicate), "start a put")
        for layer in range(layers):
            places = [[self.place(index, layer)] for index in range(objects)]
            moved = store.batch_put_from_multi_buffer_ranges(names, places, sizes, [[layer * nbytes]] * objects)
            _zero([each - nbytes for each in moved], "put")
        _zero(store.batch_put_session_end(names), "end a put")

    def load(self, names: list[str]) -> None:
        store, (objects, layers, nbytes) = self._store, self.shape
        sizes = [[nbytes]] * objects
        _zero(store.batch_get_session_start(names), "start a get")
        for layer in range(layers):
            places = [[self.place(index, layer)] for index in range(objects)]
            moved = store.batch_get_into_multi_buffer_ranges(names, places, sizes, [[layer * nbytes]] * objects)
            _zero([each - nbytes for each in moved], "get")
        store.batch_get_session_end(names)

    def forget(self, names: list[str]) -> None:
        _zero(self._store.batch_remove(names, True), "remove")

    def close(self) -> None:
        self._store.close()

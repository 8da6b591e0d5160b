"""A Mooncake store behind the arena: one object a chunk, its layers as ranges of put and get sessions.

Needs a package with sessions (0.3.13). How many calls reach the master does not depend on the number of
layers: a write is a start and an end, a fetch a start and a look at the sizes, for all objects of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerflow.hosts.backend import (
    Backend,
    BackendError,
    BackendInfo,
    ObjectLocation,
    ObjectResult,
    Unreachable,
    Unusable,
    pool_name,
)
from layerflow.hosts.mooncake.client import Master, MooncakeClient, explain
from layerflow.hosts.mooncake.reading import MooncakeReader
from layerflow.hosts.mooncake.setup import MooncakeOptions, connect
from layerflow.hosts.mooncake.warm import Warming, added, mapped
from layerflow.hosts.mooncake.writing import MooncakeWriter
from layerflow.memfd import SharedMemory

_COUNTED = ("full_retries", "expired_leases", "failed_calls", "failed_revokes", "sessions_taken_over")


class Mooncake(Backend):
    """A client of a store; with a segment, also one of those who give it memory.

    :param options: of ``[pool.mooncake]``; see :class:`MooncakeOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MooncakeOptions.read(options)
        self._master = Master(self._options.master, self._options.metrics)
        self._calls = MooncakeClient()
        self._reader = MooncakeReader(self._calls, self._master)
        self._writer = MooncakeWriter(self._calls, self._master)
        self._warming: Warming | None = None

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        if not self._leave():
            raise Unreachable("Mooncake: a call of the client before has not come back yet")
        before = mapped()
        client = connect(self._options, self._master)
        self._calls.open(client.store)
        code = self._calls("register_buffer", arena.address, arena.nbytes)
        if code != 0:
            self.close()
            raise Unusable(
                f"Mooncake cannot register the arena of {arena.nbytes} bytes ({explain(code)}); with rdma, raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._writer.replicate = client.replicate
        segment = self._options.segment_size
        if segment and self._options.warm:
            self._warming = Warming(added(before, mapped(), segment), segment)
        return BackendInfo(
            {
                "version": client.version,
                "master": self._options.master,
                "client": client.name,
                "protocol": self._options.protocol,
                "segment_bytes": segment,
                "replicas": self._options.replicas,
            }
        )

    def check(self) -> None:
        self._master.check()

    def statistics(self) -> dict[str, float]:
        counts = self._calls.counts
        figures: dict[str, float] = {name: counts.get(name, 0) for name in _COUNTED}
        figures["segment_bytes"] = self._options.segment_size
        figures["segment_warm_bytes"] = self._warming.warm_bytes if self._warming else 0
        figures["masters_lost"] = self._master.lost
        return figures

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._master.reach()
        return [code == 1 for code in self._calls.codes("batch_is_exist", [pool_name(key) for key in keys])]

    def hide(self, keys: Sequence[bytes]) -> None:
        """By force: every lookup leases, so that without it nothing that is in demand could be removed."""
        if keys and self._master.generation:
            self._calls("batch_remove", [pool_name(key) for key in keys], True)

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Everything of layerflow's in the store, whichever server wrote it; by force, as in :meth:`hide`."""
        if not self._master.generation:
            raise Unreachable("the Mooncake master does not answer; purge again when it is back")
        removed = int(self._calls("remove_by_regex", f"^{pool_name(b'')}.*", True))
        if removed < 0:
            raise BackendError(f"the Mooncake master removed nothing: {explain(removed)}")
        return removed

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
        if self._warming is not None:
            self._warming.stop()
            self._warming = None
        left = self._calls.close()
        self._reader.forget()
        self._writer.forget()
        self._master.close()
        return left

"""A Mooncake store behind the arena: one object a chunk, its layers as ranges of put and get sessions.

Needs a package with sessions (0.3.13). How many calls reach the master does not depend on the number of
layers: a write is a start and an end, a fetch a start and a look at the sizes, for all objects of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerflow.hosts.backend import (
    OK,
    BackendError,
    BackendInfo,
    ObjectLocation,
    ObjectResult,
    Unreachable,
    pool_name,
)
from layerflow.hosts.mooncake.client import Master, MooncakeClient, explain
from layerflow.hosts.mooncake.condemned import Condemned
from layerflow.hosts.mooncake.reading import MooncakeReader
from layerflow.hosts.mooncake.setup import MooncakeOptions, connect
from layerflow.hosts.mooncake.warm import Warming, added, mapped
from layerflow.hosts.mooncake.writing import MooncakeWriter
from layerflow.hosts.shared.store import SharedStore
from layerflow.system.memfd import SharedMemory

_COUNTED = ("full_retries", "expired_leases", "failed_calls", "failed_revokes", "sessions_taken_over")


class Mooncake(SharedStore[MooncakeClient, MooncakeReader, MooncakeWriter]):
    """A client of a store; with a segment, also one of those who give it memory.

    :param options: of ``[pool.mooncake]``; see :class:`MooncakeOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MooncakeOptions.read(options)
        master = Master(self._options.master, self._options.metrics)
        calls = MooncakeClient(master)
        super().__init__(
            "Mooncake", calls, master, MooncakeReader(calls, master), MooncakeWriter(calls, master), _COUNTED
        )
        self._condemned = Condemned(self._calls)
        self._warming: Warming | None = None

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        self._start_over()
        before = mapped()
        client = connect(self._options, self._service)
        self._use(client.store, arena)
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
        self._service.check()
        self._condemned.remove()

    def statistics(self) -> dict[str, float]:
        figures = super().statistics()
        figures["segment_bytes"] = self._options.segment_size
        figures["segment_warm_bytes"] = self._warming.warm_bytes if self._warming else 0
        figures["masters_lost"] = self._service.lost
        return figures

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._service.reach()
        names = [pool_name(key) for key in keys]
        # Asking for one that is to be removed would lease it again.
        asked = [name for name, key in zip(names, keys, strict=True) if key not in self._condemned]
        codes = self._calls.codes("batch_is_exist", asked) if asked else []
        there = {name for name, code in zip(asked, codes, strict=True) if code == 1}
        if there and self._reader.offloads:
            there &= self._reader.in_memory([name for name in asked if name in there])
        return [name in there for name in names]

    def hide(self, keys: Sequence[bytes]) -> None:
        """They are removed once no lease keeps them."""
        self._condemned.add(keys)

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Everything of layerflow's in the store, whichever server wrote it; by force, which bypasses leases.

        A node that is reading finds by its checksum that the bytes are no longer those of its object.
        """
        if not self._service.generation:
            raise Unreachable("the Mooncake master does not answer; purge again when it is back")
        removed = int(self._calls("remove_by_regex", f"^{pool_name(b'')}.*", True))
        if removed < 0:
            raise BackendError(f"the Mooncake master removed nothing: {explain(removed)}")
        return removed

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        results = super().commit(places, until)
        self._condemned.discard(place.key for place, result in zip(places, results, strict=True) if result is OK)
        return results

    def _register(self, arena: SharedMemory) -> str:
        code = self._calls("register_buffer", arena.address, arena.nbytes)
        return explain(code) if code != 0 else ""

    def _leave(self) -> bool:
        if self._warming is not None:
            self._warming.stop()
            self._warming = None
        self._condemned.forget()
        return super()._leave()

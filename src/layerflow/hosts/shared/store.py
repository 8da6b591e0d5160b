"""A store that nodes share, behind a native client: what the backends of Mooncake and memcache have in common.

How objects are written and read is in :mod:`.open_write` and :mod:`.open_read`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from layerflow.hosts.backend import Backend, ObjectLocation, ObjectResult, Unreachable, Unusable
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.open_read import StoreReader
from layerflow.hosts.shared.open_write import StoreWriter
from layerflow.hosts.shared.service import Service
from layerflow.system.memfd import SharedMemory

Client = TypeVar("Client", bound=ClientHandle)
Reader = TypeVar("Reader", bound=StoreReader)
Writer = TypeVar("Writer", bound=StoreWriter)


class SharedStore(Backend, Generic[Client, Reader, Writer]):
    """All of a backend but attaching, checking, looking and hiding.

    :param whose: the store's name, for messages.
    :param service: that keeps the store's directory.
    :param counted: names of what the client counts, for :meth:`statistics`.
    """

    def __init__(
        self, whose: str, client: Client, service: Service, reader: Reader, writer: Writer, counted: Sequence[str]
    ) -> None:
        self._whose = whose
        self._calls, self._service, self._reader, self._writer = client, service, reader, writer
        self._counted = counted

    def statistics(self) -> dict[str, float]:
        counts = self._calls.counts
        return {name: counts.get(name, 0) for name in self._counted}

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

    def _start_over(self) -> None:
        """Before a client is made, there is no other one.

        :raises Unreachable: calls of the client before do not come back.
        """
        if not self._leave():
            raise Unreachable(f"{self._whose}: a call of the client before has not come back yet")

    def _use(self, store: Any, arena: SharedMemory) -> None:
        """Calls go to a new client, with the arena registered.

        :raises Unusable: it cannot register the arena.
        """
        self._calls.open(store)
        if why := self._register(arena):
            self.close()
            raise Unusable(
                f"{self._whose} cannot register the arena of {arena.nbytes} bytes ({why}); with rdma, raise the limit "
                "of locked memory (ulimit -l)"
            )
        self._writer.arena = self._reader.arena = arena

    @abc.abstractmethod
    def _register(self, arena: SharedMemory) -> str:
        """Let the client copy to and from the arena: "" if it may, else why not."""

    def _leave(self) -> bool:
        """Disconnect. False: calls of the client do not come back, so it is still there."""
        left = self._calls.close()
        self._reader.forget()
        self._writer.forget()
        self._service.close()
        return left

"""Reading objects from a shared store: a lease, layers in order, and proof that the bytes were the object's.

What Mooncake's and memcache's readers have in common. A lease tells that the store gave the memory to nobody else, as
long as its metadata service is the one that gave the lease. The checksum in the header tells it of the bytes: it is
compared with the last layer.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.open_write import LATE
from layerflow.hosts.shared.service import Service
from layerflow.objects import HEADER_BYTES, get_checksum
from layerflow.system.memfd import SharedMemory

OTHER_SIZE = ObjectResult(ObjectStatus.MISSING, "it is there with another size")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is read without having been opened")
_RESTARTED = ObjectResult(ObjectStatus.EXPIRED, "the store's metadata service ended, and its leases with it")
_TOO_SLOW = ObjectResult(ObjectStatus.EXPIRED, "it took longer than its lease")
_OTHER_BYTES = ObjectResult(ObjectStatus.BROKEN, "its bytes are not those that were written: the checksum differs")


@dataclass(slots=True)
class OpenRead:
    """A lease on an object in a shared store."""

    generation: int  #: of the metadata service that gave the lease; see :attr:`Service.generation`
    expires_at: float = math.inf  #: monotonic seconds, a margin taken off; where the library does not look itself
    address: int = 0  #: of the header in the store; 0 where objects are addressed by name
    readers: int = 0  #: jobs that share the lease


@dataclass(slots=True)
class _Sum:
    """What has been read of an object in order, from its first layer on."""

    layers: int = 0
    state: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


class StoreReader(abc.ABC):
    """The fetch thread's; :meth:`check` is any thread's.

    :ivar arena: where places lie.
    """

    def __init__(self, client: ClientHandle, service: Service) -> None:
        self._client, self._service = client, service
        self._sums: dict[tuple[bytes, int], _Sum] = {}
        self.arena: SharedMemory | None = None

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """See :meth:`Backend.open_fetch`."""
        if not places:
            return []
        if time.monotonic() >= until:
            return [LATE] * len(places)
        return self._lease(places, self._service.reach())

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """One range an object: its layers lie in one piece, in the store as in the arena."""
        results = [self.check(place) for place in places]
        wanted = [at for at, result in enumerate(results) if result is OK]
        if wanted and time.monotonic() >= until:
            return [LATE if result is OK else result for result in results]
        copied = self._copy([places[at] for at in wanted], lo, hi, until) if wanted else []
        for at, result in zip(wanted, copied, strict=True):
            # Looked at again after the bytes have come: their room may have been given to other objects meanwhile.
            results[at] = self.check(places[at]) if result is OK else result
            if results[at] is OK:
                results[at] = self._compare(places[at], lo, hi)
        if expired := sum(result.outcome is ObjectStatus.EXPIRED for result in results):
            self._client.count("expired_leases", expired)
        return results

    def close(self, places: Sequence[ObjectLocation]) -> None:
        """Give leases back."""
        for place in places:
            self._sums.pop((place.key, place.offset), None)
        self._unlease(places)

    def forget(self) -> None:
        """The client they were leased with is gone."""
        self._sums.clear()

    def check(self, place: ObjectLocation) -> ObjectResult:
        """May it be read, and was what was read until now its own?"""
        opened = self._opened(place)
        if opened is None:
            return _NOT_OPEN
        if opened.generation != self._service.generation:
            return _RESTARTED
        return OK if time.monotonic() < opened.expires_at else _TOO_SLOW

    def _compare(self, place: ObjectLocation, lo: int, hi: int) -> ObjectResult:
        """Layers `lo` to `hi` have come; with the last one, is the payload what its writer summed up?"""
        if self.arena is None:
            return OK
        done = self._sums.setdefault((place.key, place.offset), _Sum())
        if done.layers != lo:
            return OK  # some were read by another call, or twice: there is no sum of this one
        base = place.offset
        done.state.update(self.arena.view[base + place.start(lo) : base + place.start(hi)])
        done.layers = hi
        wanted = get_checksum(self.arena.view[base : base + HEADER_BYTES])
        if hi < place.layers or not wanted or wanted == done.state.intdigest():
            return OK
        return _OTHER_BYTES

    # What each store does in its own way -----------------------------------------------------------

    @abc.abstractmethod
    def _lease(self, places: Sequence[ObjectLocation], generation: int) -> list[ObjectResult]:
        """Leases, in a number of calls that does not depend on the number of objects.

        :param generation: of the metadata service that gives them.
        """

    @abc.abstractmethod
    def _opened(self, place: ObjectLocation) -> OpenRead | None:
        """The lease, while there is one."""

    @abc.abstractmethod
    def _copy(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """Copy layers `lo` to `hi` of leased objects into the arena, and the header before layer 0."""

    @abc.abstractmethod
    def _unlease(self, places: Sequence[ObjectLocation]) -> None:
        """Give back the leases of those that have one."""

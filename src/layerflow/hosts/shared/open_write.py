"""Writing objects to a shared store: memory for each, its layers in order, its header, and then it is published.

What Mooncake's and memcache's writers have in common. What a store does in its own way are the four methods at the end
of :class:`StoreWriter`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.service import Service
from layerflow.objects import HEADER_BYTES, set_checksum
from layerflow.system.memfd import SharedMemory

FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
"""A full store evicts by itself, in the background, once an allocation has found it full."""

LATE = ObjectResult(ObjectStatus.FAILED, "no time was left for it")
FULL = ObjectResult(ObjectStatus.FULL, "no room in the store")
_BEING_WRITTEN = ObjectResult(ObjectStatus.EXISTS, "it is being written")
_TOO_LARGE = ObjectResult(ObjectStatus.TOO_LARGE, "it is larger than the memory of any client of the store")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is written without having been opened")
_OUT_OF_ORDER = ObjectResult(ObjectStatus.FAILED, "its layers came out of order, or not all")
_RESTARTED = ObjectResult(
    ObjectStatus.FAILED, "the store's metadata service ended, and with it the room for this object"
)
_TOO_SLOW = ObjectResult(ObjectStatus.FAILED, "the lease of its room ran out before it was complete")


@dataclass(slots=True)
class OpenWrite:
    """Memory in a shared store for an object that is not published yet."""

    generation: int  #: of the metadata service that allocated it; see :attr:`Service.generation`
    expires_at: float  #: monotonic seconds; from then on the store may give the memory to others
    address: int = 0  #: of the header in the store; 0 where objects are addressed by name
    layers: int = 0  #: leading layers that are written
    checksum: xxhash.xxh3_64 | None = field(default_factory=xxhash.xxh3_64)  #: of these; None = not kept

    def check(self, generation: int, layers: int | None = None) -> ObjectResult:
        """Whether it may still be written.

        :param layers: exactly so many must be written; None = any number.
        """
        if layers is not None and self.layers != layers:
            return _OUT_OF_ORDER
        if self.generation != generation:
            return _RESTARTED
        return OK if time.monotonic() < self.expires_at else _TOO_SLOW


class StoreWriter(abc.ABC):
    """The write thread's; :meth:`check` is any thread's.

    :ivar arena: where places lie.
    """

    def __init__(self, client: ClientHandle, service: Service) -> None:
        self._client, self._service = client, service
        self._open: dict[bytes, OpenWrite] = {}
        self.arena: SharedMemory | None = None

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Room for new objects, tried again while the store is full and evicts."""
        results = [_BEING_WRITTEN] * len(places)
        now = time.monotonic()
        # Whoever opened these can write no more, and has not said so.
        self.revoke([place for place in places if place.key in self._open and self._open[place.key].expires_at <= now])
        pending: dict[bytes, int] = {}
        for at, place in enumerate(places):
            if place.key not in self._open and pending.setdefault(place.key, at) == at:
                results[at] = LATE
        wanted, pause = list(pending.values()), FIRST_RETRY_S
        try:
            while wanted and time.monotonic() < until:
                found = self._allocate([places[at] for at in wanted], until)
                for at, result in zip(wanted, found, strict=True):
                    results[at] = result
                wanted = [at for at in wanted if results[at].outcome is ObjectStatus.FULL]
                largest = self._service.largest_segment() if wanted else 0
                for at in [at for at in wanted if 0 < largest < places[at].nbytes]:
                    results[at] = _TOO_LARGE
                    wanted.remove(at)
                if wanted:
                    self._client.count("full_retries", len(wanted))
                    time.sleep(max(0.0, min(pause, until - time.monotonic())))
                    pause = min(2 * pause, LAST_RETRY_S)
        except BaseException:  # no caller knows which of them this call has opened
            self.revoke([places[at] for at in pending.values()])
            raise
        return results

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """One range an object, without its header."""
        results = [self.check(place, lo) for place in places]
        results = self._put(places, [(place.start(lo), place.start(hi)) for place in places], results, until)
        for place, result in zip(places, results, strict=True):
            opened = self._open.get(place.key)
            if result is OK and opened is not None:
                opened.layers = hi
                if opened.checksum is not None and self.arena is not None:
                    base = place.offset
                    opened.checksum.update(self.arena.view[base + place.start(lo) : base + place.start(hi)])
        return results

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """The headers, then the objects are published."""
        results = [self.check(place, place.layers) for place in places]
        for place, result in zip(places, results, strict=True):
            checksum = self._open[place.key].checksum if result is OK else None
            if checksum is not None and self.arena is not None:
                set_checksum(self.arena.view[place.offset : place.offset + HEADER_BYTES], checksum.intdigest())
        try:
            results = self._put(places, [(0, HEADER_BYTES)] * len(places), results, until)
        except BaseException:  # nothing of them is published
            self.revoke(places)
            raise
        ready = [at for at, result in enumerate(results) if result is OK]
        try:
            published = self._publish([places[at] for at in ready], until) if ready else []
        except BaseException:  # they may be complete all the same, and are not to be touched
            for at in ready:
                del self._open[places[at].key]
            raise
        finally:
            self.revoke([place for place, result in zip(places, results, strict=True) if result is not OK])
        for at, result in zip(ready, published, strict=True):
            results[at] = result
            if result is OK:
                del self._open[places[at].key]
        self.revoke([places[at] for at in ready])
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Give the room back, as far as it is known to be this writer's."""
        ended = {place.key: self._open.pop(place.key) for place in places if place.key in self._open}
        try:
            if ended:
                self._give_back(ended)
        except Unreachable:
            self._client.count("failed_revokes", len(ended))

    def forget(self) -> None:
        """The client they were opened with is gone."""
        self._open.clear()

    def check(self, place: ObjectLocation, layers: int | None = None) -> ObjectResult:
        """May it be written, and was what was written until now into its own room?

        :param layers: so many must have been written.
        """
        opened = self._open.get(place.key)
        return _NOT_OPEN if opened is None else opened.check(self._service.generation, layers)

    def room(self, place: ObjectLocation) -> tuple[int, float] | None:
        """Address of an opened object in the store, and until when it may be written; for who copies by other ways."""
        opened = self._open.get(place.key)
        return None if opened is None else (opened.address, opened.expires_at)

    def landed(self, places: Sequence[ObjectLocation]) -> None:
        """All layers of these opened objects were written, by other ways than :meth:`write`."""
        for place in places:
            if place.key in self._open:
                self._open[place.key].layers, self._open[place.key].checksum = place.layers, None

    def _put(
        self,
        places: Sequence[ObjectLocation],
        spans: Sequence[tuple[int, int]],
        results: list[ObjectResult],
        until: float,
    ) -> list[ObjectResult]:
        """Copy a span of each object whose verdict is OK so far."""
        wanted = [at for at, result in enumerate(results) if result is OK]
        if wanted and time.monotonic() >= until:
            return [LATE if result is OK else result for result in results]
        copied = self._copy([places[at] for at in wanted], [spans[at] for at in wanted], until) if wanted else []
        for at, result in zip(wanted, copied, strict=True):
            # Looked at again: what was written late may lie in another's room, and must not be published.
            results[at] = self.check(places[at]) if result is OK else result
        return results

    # What each store does in its own way -----------------------------------------------------------

    @abc.abstractmethod
    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """One attempt at room for each; what is OK is in ``_open`` from then on, what is FULL is tried again."""

    @abc.abstractmethod
    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        """Copy bytes `spans[i]` of `places[i]` out of the arena."""

    @abc.abstractmethod
    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Make complete objects visible; what is not OK is given back next."""

    @abc.abstractmethod
    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """These keys will not be finished. They have left ``_open``.

        :raises Unreachable: it counts them as failed revokes.
        """

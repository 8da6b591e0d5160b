"""A store that nodes share, behind a native client: what the backends of Mooncake and memcache have in common.

Objects are written by a :class:`StoreWriter` and read by a :class:`StoreReader`.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import xxhash

from layerflow.hosts.backend import OK, Backend, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, Unusable
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.service import Service
from layerflow.objects import HEADER_BYTES, get_checksum, set_checksum
from layerflow.system.memfd import SharedMemory

# Writing objects to a shared store: memory for each, its layers in order, its header, and then it is published.
#
# What Mooncake's and memcache's writers have in common. What a store does in its own way are the five methods at the
# end of :class:`StoreWriter`.


FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
"""A full store evicts by itself, in the background, once an allocation has found it full."""

LATE = ObjectResult(ObjectStatus.FAILED, "no time was left for it")
FULL = ObjectResult(ObjectStatus.FULL, "no room in the store")
_BEING_WRITTEN = ObjectResult(ObjectStatus.EXISTS, "it is being written")
_TOO_LARGE = ObjectResult(ObjectStatus.TOO_LARGE, "it is larger than the memory of any client of the store")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is written without having been opened")
_OPENED_ANEW = ObjectResult(ObjectStatus.FAILED, "the lease of its room ran out, and another job has opened it since")
_OUT_OF_ORDER = ObjectResult(ObjectStatus.FAILED, "its layers came out of order, or not all")
_RESTARTED = ObjectResult(
    ObjectStatus.FAILED, "the store's metadata service ended, and with it the room for this object"
)
_TOO_SLOW = ObjectResult(ObjectStatus.FAILED, "the lease of its room ran out before it was complete")


@dataclass(slots=True)
class OpenWrite:
    """Memory in a shared store for an object that is not published yet."""

    offset: int  #: where the object lies in the arena: tells the job that opened it from others of the same key
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
        self._give_up(
            [place.key for place in places if place.key in self._open and self._open[place.key].expires_at <= now]
        )
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

        def copy(some: Sequence[ObjectLocation]) -> list[ObjectResult]:
            return self._copy(some, [(place.start(lo), place.start(hi)) for place in some], until)

        results = self._put(places, copy, [self.check(place, lo) for place in places], until)
        for place, result in zip(places, results, strict=True):
            opened = self._of(place)
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
            results = self._put(places, lambda some: self._copy_headers(some, until), results, until)
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
        """Give the room back, as far as it is known to be this writer's, and as it was opened from these places."""
        self._give_up([place.key for place in places if self._of(place) is not None])

    def _give_up(self, keys: Iterable[bytes]) -> None:
        ended = {key: self._open.pop(key) for key in dict.fromkeys(keys)}
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
        opened = self._of(place)
        if opened is None:
            return _OPENED_ANEW if place.key in self._open else _NOT_OPEN
        return opened.check(self._service.generation, layers)

    def room(self, place: ObjectLocation) -> tuple[int, float] | None:
        """Address of an opened object in the store, and until when it may be written; for who copies by other ways."""
        opened = self._of(place)
        return None if opened is None else (opened.address, opened.expires_at)

    def landed(self, places: Sequence[ObjectLocation], headers: Sequence[ObjectLocation]) -> None:
        """All layers of these objects were written, by other ways than :meth:`write`.

        :param places: that they were opened for. :param headers: where their headers lie; :meth:`commit` is called with
            these.
        """
        for place, header in zip(places, headers, strict=True):
            opened = self._of(place)
            if opened is not None:
                opened.offset, opened.layers, opened.checksum = header.offset, place.layers, None

    def _of(self, place: ObjectLocation) -> OpenWrite | None:
        """None also for another job of this key: its room is not this one's."""
        opened = self._open.get(place.key)
        return opened if opened is not None and opened.offset == place.offset else None

    def _put(
        self,
        places: Sequence[ObjectLocation],
        copy: Callable[[Sequence[ObjectLocation]], list[ObjectResult]],
        results: list[ObjectResult],
        until: float,
    ) -> list[ObjectResult]:
        """Copy a part of each object whose verdict is OK so far."""
        wanted = [at for at, result in enumerate(results) if result is OK]
        if wanted and time.monotonic() >= until:
            return [LATE if result is OK else result for result in results]
        copied = copy([places[at] for at in wanted]) if wanted else []
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
    def _copy_headers(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Copy the header of each, with 0 for the generation word (:func:`layerflow.objects.stored_header`)."""

    @abc.abstractmethod
    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Make complete objects visible; what is not OK is given back next."""

    @abc.abstractmethod
    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """Give up keys that will not be finished. They have left ``_open``.

        :raises Unreachable: it counts them as failed revokes.
        """


# Reading objects from a shared store: a lease, layers in order, and proof that the bytes were the object's.
#
# What Mooncake's and memcache's readers have in common. A lease tells that the store gave the memory to nobody else, as
# long as its metadata service is the one that gave the lease. The checksum in the header tells it of the bytes: it is
# compared with the last layer.


OTHER_SIZE = ObjectResult(ObjectStatus.MISSING, "it is there with another size")
_NOT_OPEN_TO_READ = ObjectResult(ObjectStatus.FAILED, "it is read without having been opened")
_LEASES_GONE = ObjectResult(ObjectStatus.EXPIRED, "the store's metadata service ended, and its leases with it")
_LEASE_OVER = ObjectResult(ObjectStatus.EXPIRED, "it took longer than its lease")
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
            return _NOT_OPEN_TO_READ
        if opened.generation != self._service.generation:
            return _LEASES_GONE
        return OK if time.monotonic() < opened.expires_at else _LEASE_OVER

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
        self, whose: str, client: Client, service: Service, *, reader: Reader, writer: Writer, counted: Sequence[str]
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

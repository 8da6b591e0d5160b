"""Saving into memcache: room first, layers in order, the header last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.memcache.client import H2G, AddressRange, MemcacheClient, ObjectInfo
from layerflow.hosts.memcache.codes import writing
from layerflow.hosts.memcache.headers import Scratch
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.reading import LATE, MARGIN_S
from layerflow.memfd import SharedMemory
from layerflow.objects import HEADER_BYTES

_MANY = 4096


@dataclass(slots=True)
class _Sighting:
    info: ObjectInfo
    since: float


class AbandonedRooms:
    """Remembers what was seen unfinished, and removes what has been so for longer than any writer may take.

    :param after_s: longer than a write's lease: its owner, if it lives, has stopped by then.
    """

    def __init__(self, calls: MemcacheClient, after_s: float) -> None:
        self._calls, self._after_s = calls, after_s
        self._seen: dict[str, _Sighting] = {}

    def look(self, there: Mapping[str, ObjectInfo]) -> set[str]:
        """What of these was removed just now.

        :param there: what a writer found in the pool, complete or not.
        """
        if not there:
            return set()
        names = list(there)
        complete = self._calls.info(names, complete=True)
        now = time.monotonic()
        over: list[str] = []
        for name, info in zip(names, complete, strict=True):
            sight = self._seen.get(name)
            if info.nbytes:
                self._seen.pop(name, None)
            elif sight is None or sight.info != there[name]:
                self._seen[name] = _Sighting(there[name], now)
            elif now - sight.since > self._after_s:
                over.append(name)
                del self._seen[name]
        if len(self._seen) > _MANY:  # the oldest; dictionaries keep their order
            for name in list(self._seen)[: _MANY // 2]:
                del self._seen[name]
        if over:
            self._calls.count("abandoned_removed", len(over))
        return {name for name, code in zip(over, self._calls.remove(over), strict=True) if code == 0}


LEASE_S = 60.0
ABANDONED_S = 90.0
"""An allocation that was seen unfinished for so long has no owner: longer than a lease."""
READ_BACK_MS = 2000
FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
"""A full pool evicts by itself, in the background, once an allocation has found it full."""

_THERE = ObjectResult(ObjectStatus.EXISTS, "it is there already")
_BEING_WRITTEN = ObjectResult(ObjectStatus.EXISTS, "it is being written")
_QUICKER = ObjectResult(ObjectStatus.EXISTS, "another writer was quicker")
_ABANDONED = ObjectResult(
    ObjectStatus.EXISTS, "its writer left it unfinished; it was removed now, and can be written again"
)
_FULL = ObjectResult(ObjectStatus.FULL, "no room in the pool")
_NOT_FREE = ObjectResult(ObjectStatus.FULL, "no room but that of an object which left a moment ago")
"""The client's table still has that object there, for up to a second, and lets nobody write."""
_TOO_LARGE = ObjectResult(ObjectStatus.TOO_LARGE, "it is larger than the memory of any client of the pool")
_REMEMBERED = ObjectResult(
    ObjectStatus.FAILED, "it left the pool a moment ago, and the client still remembers where it was"
)
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is written without having been opened")
_NEW_META = ObjectResult(ObjectStatus.FAILED, "memcache's MetaService ended, and with it the room for this object")
_STALE = ObjectResult(ObjectStatus.FAILED, f"it took longer than its lease of {LEASE_S:.0f} s")
_OUT_OF_ORDER = ObjectResult(ObjectStatus.FAILED, "its layers came out of order, or not all")
_NOT_WRITTEN = ObjectResult(ObjectStatus.FAILED, "what was published is not what was written; it was removed again")


@dataclass(slots=True)
class _Room:
    """:param until: of its lease, the margin taken off. :param layers: so many have been written."""

    gva: int
    until: float
    generation: int
    layers: int = 0


class MemcacheWriter:
    """The write thread's."""

    def __init__(self, calls: MemcacheClient, meta: MetaService) -> None:
        self._calls, self._meta = calls, meta
        self._open: dict[bytes, _Room] = {}
        self._abandoned = AbandonedRooms(calls, ABANDONED_S)
        self.number = 0  #: this client's, in the pool
        self.scratch: Scratch | None = None
        self.arena: SharedMemory | None = None

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Room, tried again while the pool evicts."""
        results: dict[int, ObjectResult] = {}
        pending: dict[bytes, int] = {}
        for at, place in enumerate(places):
            if place.key in self._open or place.key in pending:
                results[at] = _BEING_WRITTEN
            else:
                pending[place.key] = at
        wanted, pause = list(pending.values()), FIRST_RETRY_S
        claimed: set[bytes] = set()
        try:
            while wanted:
                if time.monotonic() >= until:
                    results |= {at: results.get(at, LATE) for at in wanted}
                    break
                found = self._try([places[at] for at in wanted], claimed, until)
                results |= zip(wanted, found, strict=True)
                wanted = [at for at, result in zip(wanted, found, strict=True) if result.outcome is ObjectStatus.FULL]
                if wanted:
                    self._calls.count("full_retries", len(wanted))
                    time.sleep(max(0.0, min(pause, until - time.monotonic())))
                    pause = min(2 * pause, LAST_RETRY_S)
        finally:
            self._remove([pool_name(key) for key in claimed])
        return [results[at] for at in range(len(places))]

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """One span an object, without its header."""
        results = [self.check(place, lo) for place in places]
        results = self._put(places, [(place.start(lo), place.start(hi)) for place in places], results, until)
        for place, result in zip(places, results, strict=True):
            if result is OK:
                self._open[place.key].layers = hi
        return results

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """The headers; then it is published, and the headers are read back.

        Read back, because the client skips writes without an error where it takes an address for that of an object
        which is complete: one that was there before, and that it has not forgotten.
        """
        results = [self.check(place, place.layers) for place in places]
        results = self._put(places, [(0, HEADER_BYTES)] * len(places), results, until)
        ready = [at for at, result in enumerate(results) if result is OK]
        rooms = {at: self._open.pop(places[at].key) for at in ready}
        self.revoke([place for place, result in zip(places, results, strict=True) if result is not OK])
        names = [pool_name(places[at].key) for at in ready]
        for at, code in zip(ready, self._calls.finish(names), strict=True):
            results[at] = writing(code)
        published = [at for at in ready if results[at] is OK]
        assert self.arena is not None
        wrong: list[str] = []
        headers = self._headers([(pool_name(places[at].key), rooms[at].gva) for at in published], until)
        for at, header in zip(published, headers, strict=True):
            begin = places[at].offset
            if header != self.arena.array[begin : begin + HEADER_BYTES].tobytes():
                results[at] = _NOT_WRITTEN
                wrong.append(pool_name(places[at].key))
        if wrong:
            self._calls.count("skipped_writes", len(wrong))
            self._calls.remove(wrong)
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Remove what is this writer's, while it certainly is. Its memory stays taken until the lease has run out."""
        rooms = [(place.key, self._open.pop(place.key)) for place in places if place.key in self._open]
        now, generation = time.monotonic(), self._meta.generation
        self._remove([pool_name(key) for key, room in rooms if room.generation == generation and now < room.until])

    def forget(self) -> None:
        """The client they were opened with is gone."""
        self._open.clear()

    def _try(self, places: Sequence[ObjectLocation], claimed: set[bytes], until: float) -> list[ObjectResult]:
        """One attempt at room for each.

        :param claimed: what earlier attempts allocated, but cannot address yet.
        """
        generation = self._meta.reach()
        names = [pool_name(place.key) for place in places]
        sizes = [place.nbytes + self.number for place in places]
        infos = self._calls.info(names, complete=False)
        claimed -= {place.key for place, info in zip(places, infos, strict=True) if not info.nbytes}
        results = [
            _THERE if info.nbytes and place.key not in claimed else OK
            for place, info in zip(places, infos, strict=True)
        ]
        cleared = self._abandoned.look(
            {name: info for name, info, result in zip(names, infos, results, strict=True) if result is _THERE}
        )
        for at, name in enumerate(names):
            if name in cleared:
                results[at] = _ABANDONED
            elif results[at] is OK and self._calls.remembers(name):
                results[at] = _REMEMBERED
        absent = [at for at, result in enumerate(results) if result is OK]
        began, wanted = time.monotonic(), [names[at] for at in absent]
        gvas = self._calls.allocate(wanted, [sizes[at] for at in absent], round(LEASE_S * 1e3))
        largest = 0 if all(gvas) else self._meta.largest_segment()
        owned: list[tuple[int, int]] = []
        for at, gva, info in zip(absent, gvas, self._calls.info(wanted, complete=False), strict=True):
            place = places[at]
            if not info.nbytes:
                results[at] = _TOO_LARGE if 0 < largest < place.nbytes else _FULL
            elif info.nbytes != sizes[at]:
                results[at] = _QUICKER
                self._calls.count("lost_races")
                self._calls.lose(names[at], began + LEASE_S + MARGIN_S)
            elif info.gva != gva:
                results[at] = _NOT_FREE
                claimed.add(place.key)
            else:
                owned.append((at, gva))
                claimed.discard(place.key)
        assert self.scratch is not None
        failed: list[ObjectLocation] = []
        for (at, gva), code in zip(owned, self.scratch.blank([gva for _, gva in owned], until), strict=True):
            results[at] = writing(code)
            self._open[places[at].key] = _Room(gva, began + LEASE_S - MARGIN_S, generation)
            if code != 0:
                failed.append(places[at])
        self.revoke(failed)
        return results

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
        copies: list[AddressRange] = []
        for at in wanted:
            start, stop = spans[at]
            copies.append(
                AddressRange(self._open[places[at].key].gva + start, places[at].address + start, stop - start)
            )
        for at, code in zip(wanted, self._calls.copy(copies, H2G, until), strict=True):
            # Looked at again: what was written late may lie in another's room, and must not be published.
            results[at] = writing(code) if code else self.check(places[at])
        return results

    def _headers(self, published: Sequence[tuple[str, int]], until: float) -> list[bytes]:
        """What is in the pool now, of names and addresses; nothing where it cannot be read.

        Once published, what nobody has leased leaves the client's table within a second, perhaps by now, and cannot be
        read until it is leased.
        """
        assert self.scratch is not None
        headers = [
            header if code == 0 else b"" for code, header in self.scratch.read([at for _, at in published], until)
        ]
        swept = [which for which, header in zip(published, headers, strict=True) if not header]
        if swept:
            codes = self._calls.lease([name for name, _ in swept], READ_BACK_MS)
            leased = [which for which, code in zip(swept, codes, strict=True) if code == 0]
            again = self.scratch.read([at for _, at in leased], until)
            read = {name: header for (name, _), (code, header) in zip(leased, again, strict=True) if code == 0}
            headers = [header or read.get(name, b"") for (name, _), header in zip(published, headers, strict=True)]
            self._calls.unlease([name for name, _ in leased])
        return headers

    def _remove(self, names: Sequence[str]) -> None:
        try:
            self._calls.remove(names)
        except Unreachable:
            self._calls.count("failed_revokes", len(names))

    def room(self, place: ObjectLocation) -> tuple[int, float] | None:
        """Address of an opened object in the pool, and until when it may be written; for who copies by other ways."""
        room = self._open.get(place.key)
        return None if room is None else (room.gva, room.until)

    def landed(self, places: Sequence[ObjectLocation]) -> None:
        """All layers of these opened objects were written, by other ways than :meth:`write`."""
        for place in places:
            if place.key in self._open:
                self._open[place.key].layers = place.layers

    def check(self, place: ObjectLocation, layers: int | None = None) -> ObjectResult:
        """May it be written, and was what was written until now into its own room? Any thread.

        :param layers: so many must have been written.
        """
        room = self._open.get(place.key)
        if room is None:
            return _NOT_OPEN
        if layers is not None and room.layers != layers:
            return _OUT_OF_ORDER
        if room.generation != self._meta.generation:
            return _NEW_META
        return OK if time.monotonic() < room.until else _STALE

"""Saving into memcache: room first, layers in order, the header last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.memcache.client.client import H2G, AddressRange, MemcacheClient, ObjectInfo
from layerflow.hosts.memcache.client.codes import writing
from layerflow.hosts.memcache.client.headers import Scratch
from layerflow.hosts.memcache.reading import MARGIN_S
from layerflow.hosts.shared.open_write import FULL, OpenWrite, StoreWriter
from layerflow.hosts.shared.service import Service
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

_THERE = ObjectResult(ObjectStatus.EXISTS, "it is there already")
_QUICKER = ObjectResult(ObjectStatus.EXISTS, "another writer was quicker")
_ABANDONED = ObjectResult(
    ObjectStatus.EXISTS, "its writer left it unfinished; it was removed now, and can be written again"
)
_NOT_FREE = ObjectResult(ObjectStatus.FULL, "no room but that of an object which left a moment ago")
"""The client's table still has that object there, for up to a second, and lets nobody write."""
_REMEMBERED = ObjectResult(
    ObjectStatus.FAILED, "it left the pool a moment ago, and the client still remembers where it was"
)
_NOT_WRITTEN = ObjectResult(ObjectStatus.FAILED, "what was published is not what was written; it was removed again")


class MemcacheWriter(StoreWriter):
    """The write thread's.

    :ivar number: this client's, in the pool.
    """

    def __init__(self, calls: MemcacheClient, meta: Service) -> None:
        super().__init__(calls, meta)
        self._calls = calls
        self._abandoned = AbandonedRooms(calls, ABANDONED_S)
        self._claimed: set[bytes] = set()  # allocated by earlier attempts of this call, but not addressed yet
        self.number = 0
        self.scratch: Scratch | None = None

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """See :meth:`StoreWriter.open`."""
        try:
            return super().open(places, until)
        finally:
            claimed, self._claimed = self._claimed, set()
            self._remove([pool_name(key) for key in claimed])

    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        generation, claimed = self._service.reach(), self._claimed
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
        owned: list[tuple[int, int]] = []
        for at, gva, info in zip(absent, gvas, self._calls.info(wanted, complete=False), strict=True):
            place = places[at]
            if not info.nbytes:
                results[at] = FULL
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
            self._open[places[at].key] = OpenWrite(generation, began + LEASE_S - MARGIN_S, gva)
            if code != 0:
                failed.append(places[at])
        self.revoke(failed)
        return results

    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        copies = [
            AddressRange(self._open[place.key].address + start, place.address + start, stop - start)
            for place, (start, stop) in zip(places, spans, strict=True)
        ]
        return [writing(code) for code in self._calls.copy(copies, H2G, until)]

    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Also reads the headers back.

        The client skips writes without an error where it takes an address for that of an object which is complete: one
        that was there before, and that it has not forgotten.
        """
        names = [pool_name(place.key) for place in places]
        results = [writing(code) for code in self._calls.finish(names)]
        published = [at for at, result in enumerate(results) if result is OK]
        assert self.arena is not None
        headers = self._headers([(names[at], self._open[places[at].key].address) for at in published], until)
        for at, header in zip(published, headers, strict=True):
            begin = places[at].offset
            if header != self.arena.array[begin : begin + HEADER_BYTES].tobytes():
                results[at] = _NOT_WRITTEN
                self._calls.count("skipped_writes")
        return results

    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """Its memory stays taken until the lease has run out."""
        generation = self._service.generation
        self._calls.remove([pool_name(key) for key, opened in ended.items() if opened.check(generation) is OK])

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

"""Writing to memcache: room, layers, header, and then it is published.

What the library gives two writers of one key, measured: the second allocation answers with the first one's address
and no error, and whoever has an address may publish or remove. So writers must know of each other before they write:

* *Who owns it.* Each writer asks for as many bytes more than the object needs as its number in the pool (its rank,
  which no other live client has), and then asks the MetaService for the size. An allocation is made once, with one
  size: it is the owner who reads its own. The others leave it alone: they neither copy, publish nor remove.
* *Published last.* The owner blanks the header's place at once and writes the header when all layers are there.
  Readers demand the header. So what is published half-written by a mistake (an owner that was stopped for a
  minute, finishing an allocation that meanwhile is another's) is never taken for an object.
* *Nobody writes late.* The address is the owner's for a lease; the owner stops at its end by its own clock, and when
  the MetaService that gave it ends. What is removed keeps its memory until the lease has run out. Left: a single
  copy that is under way while the MetaService dies and a new one gives its memory to others, within that copy. And
  an object evicted in the third of a second before the MetaService died, which the new one is told is still there,
  where two others had its room: one that had not come to blank the header's place, one that had written behind it.
* *Nobody blocks a key.* What an owner left unfinished is evicted after its lease like anything else; where there is
  room enough that nothing is evicted, the next writer that has seen it unchanged for longer than a lease removes it.

Three calls to the MetaService for the room of a job's objects, a fourth where some are there already or the pool is
full, and one for publishing, whatever the layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import OK, Outcome, Place, Unreachable, Verdict, pool_name
from layerflow.hosts.memcache_abandoned import Abandoned
from layerflow.hosts.memcache_calls import H2G, Calls, Span
from layerflow.hosts.memcache_codes import writing
from layerflow.hosts.memcache_meta import MetaService
from layerflow.hosts.memcache_reading import LATE, MARGIN_S
from layerflow.hosts.memcache_scratch import Scratch
from layerflow.memfd import SharedMemory
from layerflow.objects import HEADER_BYTES

LEASE_S = 60.0
ABANDONED_S = 90.0
"""An allocation that was seen unfinished for so long has no owner: longer than a lease."""
READ_BACK_MS = 2000
FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
"""A full pool evicts by itself, in the background, once an allocation has found it full."""

_THERE = Verdict(Outcome.EXISTS, "it is there already")
_BEING_WRITTEN = Verdict(Outcome.EXISTS, "it is being written")
_QUICKER = Verdict(Outcome.EXISTS, "another writer was quicker")
_ABANDONED = Verdict(Outcome.EXISTS, "its writer left it unfinished; it was removed now, and can be written again")
_FULL = Verdict(Outcome.FULL, "no room in the pool")
_NOT_FREE = Verdict(Outcome.FULL, "no room but that of an object which left a moment ago")
"""The client's table still has that object there, for up to a second, and lets nobody write."""
_TOO_LARGE = Verdict(Outcome.TOO_LARGE, "it is larger than the memory of any client of the pool")
_REMEMBERED = Verdict(Outcome.FAILED, "it left the pool a moment ago, and the client still remembers where it was")
_NOT_OPEN = Verdict(Outcome.FAILED, "it is written without having been opened")
_NEW_META = Verdict(Outcome.FAILED, "memcache's MetaService ended, and with it the room for this object")
_STALE = Verdict(Outcome.FAILED, f"it took longer than its lease of {LEASE_S:.0f} s")
_OUT_OF_ORDER = Verdict(Outcome.FAILED, "its layers came out of order, or not all")
_NOT_WRITTEN = Verdict(Outcome.FAILED, "what was published is not what was written; it was removed again")


@dataclass(slots=True)
class _Room:
    """:param until: of its lease, the margin taken off. :param layers: so many have been written."""

    gva: int
    until: float
    term: int
    layers: int = 0


class Writer:
    """The write thread's."""

    def __init__(self, calls: Calls, meta: MetaService) -> None:
        self._calls, self._meta = calls, meta
        self._open: dict[bytes, _Room] = {}
        self._abandoned = Abandoned(calls, ABANDONED_S)
        self.number = 0  #: this client's, in the pool
        self.scratch: Scratch | None = None
        self.arena: SharedMemory | None = None

    def open(self, places: Sequence[Place], until: float) -> list[Verdict]:
        """Room, tried again while the pool evicts."""
        verdicts: dict[int, Verdict] = {}
        pending: dict[bytes, int] = {}
        for at, place in enumerate(places):
            if place.key in self._open or place.key in pending:
                verdicts[at] = _BEING_WRITTEN
            else:
                pending[place.key] = at
        wanted, pause = list(pending.values()), FIRST_RETRY_S
        claimed: set[bytes] = set()
        try:
            while wanted:
                if time.monotonic() >= until:
                    verdicts |= {at: verdicts.get(at, LATE) for at in wanted}
                    break
                found = self._try([places[at] for at in wanted], claimed, until)
                verdicts |= zip(wanted, found, strict=True)
                wanted = [at for at, verdict in zip(wanted, found, strict=True) if verdict.outcome is Outcome.FULL]
                if wanted:
                    self._calls.count("full_retries", len(wanted))
                    time.sleep(max(0.0, min(pause, until - time.monotonic())))
                    pause = min(2 * pause, LAST_RETRY_S)
        finally:
            self._remove([pool_name(key) for key in claimed])
        return [verdicts[at] for at in range(len(places))]

    def write(self, places: Sequence[Place], lo: int, hi: int, until: float) -> list[Verdict]:
        """One span an object, without its header."""
        verdicts = [self.check(place, lo) for place in places]
        verdicts = self._put(places, [(place.start(lo), place.start(hi)) for place in places], verdicts, until)
        for place, verdict in zip(places, verdicts, strict=True):
            if verdict is OK:
                self._open[place.key].layers = hi
        return verdicts

    def commit(self, places: Sequence[Place], until: float) -> list[Verdict]:
        """The headers; then it is published, and the headers are read back.

        Read back, because the client skips writes without an error where it takes an address for that of an object
        which is complete: one that was there before, and that it has not forgotten.
        """
        verdicts = [self.check(place, place.layers) for place in places]
        verdicts = self._put(places, [(0, HEADER_BYTES)] * len(places), verdicts, until)
        ready = [at for at, verdict in enumerate(verdicts) if verdict is OK]
        rooms = {at: self._open.pop(places[at].key) for at in ready}
        self.revoke([place for place, verdict in zip(places, verdicts, strict=True) if verdict is not OK])
        names = [pool_name(places[at].key) for at in ready]
        for at, code in zip(ready, self._calls.finish(names), strict=True):
            verdicts[at] = writing(code)
        published = [at for at in ready if verdicts[at] is OK]
        assert self.arena is not None
        wrong: list[str] = []
        headers = self._headers([(pool_name(places[at].key), rooms[at].gva) for at in published], until)
        for at, header in zip(published, headers, strict=True):
            begin = places[at].offset
            if header != self.arena.array[begin : begin + HEADER_BYTES].tobytes():
                verdicts[at] = _NOT_WRITTEN
                wrong.append(pool_name(places[at].key))
        if wrong:
            self._calls.count("skipped_writes", len(wrong))
            self._calls.remove(wrong)
        return verdicts

    def revoke(self, places: Sequence[Place]) -> None:
        """Remove what is this writer's, while it certainly is. Its memory stays taken until the lease has run out."""
        rooms = [(place.key, self._open.pop(place.key)) for place in places if place.key in self._open]
        now, term = time.monotonic(), self._meta.term
        self._remove([pool_name(key) for key, room in rooms if room.term == term and now < room.until])

    def forget(self) -> None:
        """The client they were opened with is gone."""
        self._open.clear()

    def _try(self, places: Sequence[Place], claimed: set[bytes], until: float) -> list[Verdict]:
        """One attempt at room for each.

        :param claimed: what earlier attempts allocated, but cannot address yet.
        """
        term = self._meta.reach()
        names = [pool_name(place.key) for place in places]
        sizes = [place.nbytes + self.number for place in places]
        infos = self._calls.info(names, complete=False)
        claimed -= {place.key for place, info in zip(places, infos, strict=True) if not info.nbytes}
        verdicts = [
            _THERE if info.nbytes and place.key not in claimed else OK
            for place, info in zip(places, infos, strict=True)
        ]
        cleared = self._abandoned.look(
            {name: info for name, info, verdict in zip(names, infos, verdicts, strict=True) if verdict is _THERE}
        )
        for at, name in enumerate(names):
            if name in cleared:
                verdicts[at] = _ABANDONED
            elif verdicts[at] is OK and self._calls.remembers(name):
                verdicts[at] = _REMEMBERED
        absent = [at for at, verdict in enumerate(verdicts) if verdict is OK]
        began, wanted = time.monotonic(), [names[at] for at in absent]
        gvas = self._calls.allocate(wanted, [sizes[at] for at in absent], round(LEASE_S * 1e3))
        largest = 0 if all(gvas) else self._meta.largest_segment()
        owned: list[tuple[int, int]] = []
        for at, gva, info in zip(absent, gvas, self._calls.info(wanted, complete=False), strict=True):
            place = places[at]
            if not info.nbytes:
                verdicts[at] = _TOO_LARGE if 0 < largest < place.nbytes else _FULL
            elif info.nbytes != sizes[at]:
                verdicts[at] = _QUICKER
                self._calls.count("lost_races")
                self._calls.lose(names[at], began + LEASE_S + MARGIN_S)
            elif info.gva != gva:
                verdicts[at] = _NOT_FREE
                claimed.add(place.key)
            else:
                owned.append((at, gva))
                claimed.discard(place.key)
        assert self.scratch is not None
        failed: list[Place] = []
        for (at, gva), code in zip(owned, self.scratch.blank([gva for _, gva in owned], until), strict=True):
            verdicts[at] = writing(code)
            self._open[places[at].key] = _Room(gva, began + LEASE_S - MARGIN_S, term)
            if code != 0:
                failed.append(places[at])
        self.revoke(failed)
        return verdicts

    def _put(
        self, places: Sequence[Place], spans: Sequence[tuple[int, int]], verdicts: list[Verdict], until: float
    ) -> list[Verdict]:
        """Copy a span of each object whose verdict is OK so far."""
        wanted = [at for at, verdict in enumerate(verdicts) if verdict is OK]
        if wanted and time.monotonic() >= until:
            return [LATE if verdict is OK else verdict for verdict in verdicts]
        copies: list[Span] = []
        for at in wanted:
            start, stop = spans[at]
            copies.append(Span(self._open[places[at].key].gva + start, places[at].address + start, stop - start))
        for at, code in zip(wanted, self._calls.copy(copies, H2G, until), strict=True):
            # Looked at again: what was written late may lie in another's room, and must not be published.
            verdicts[at] = writing(code) if code else self.check(places[at])
        return verdicts

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

    def room(self, place: Place) -> tuple[int, float] | None:
        """Address of an opened object in the pool, and until when it may be written; for who copies by other ways."""
        room = self._open.get(place.key)
        return None if room is None else (room.gva, room.until)

    def landed(self, places: Sequence[Place]) -> None:
        """All layers of these opened objects were written, by other ways than :meth:`write`."""
        for place in places:
            if place.key in self._open:
                self._open[place.key].layers = place.layers

    def check(self, place: Place, layers: int | None = None) -> Verdict:
        """May it be written, and was what was written until now into its own room? Any thread.

        :param layers: so many must have been written.
        """
        room = self._open.get(place.key)
        if room is None:
            return _NOT_OPEN
        if layers is not None and room.layers != layers:
            return _OUT_OF_ORDER
        if room.term != self._meta.term:
            return _NEW_META
        return OK if time.monotonic() < room.until else _STALE

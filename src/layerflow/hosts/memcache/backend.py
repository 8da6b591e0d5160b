"""memcache_hybrid behind the arena: one object a chunk, its layers copied by address within it.

Needs packages with leases and addresses (1.3). How many calls reach the MetaService does not depend on the number of
layers: a write is a look, an allocation and a look, and the publication; a fetch a lease and a look. What is known of
the library, and what layerflow does about it, is told where it is done: :mod:`.client` (its table of
addresses), :class:`MemcacheReader` (leases), :class:`MemcacheWriter` (two writers of one key).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerflow.hosts.backend import OK, BackendInfo, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.memcache.client import (
    G2H,
    H2G,
    WRONG_STATE,
    AddressRange,
    HeaderBuffer,
    MemcacheClient,
    ObjectInfo,
    explain,
    leasing,
    reaches_all,
    reading,
    writing,
)
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.setup import MemcacheOptions, connect, shared
from layerflow.hosts.shared.service import Service
from layerflow.hosts.shared.store import FULL, OTHER_SIZE, OpenRead, OpenWrite, SharedStore, StoreReader, StoreWriter
from layerflow.objects import GENERATION_AT, pack_header, stored_header
from layerflow.system.memfd import SharedMemory

# Reading from memcache: a lease first, then the address; layers then ask the MetaService nothing.
#
# An address has no identity: it is a place in some client's memory. That what was copied from it is this object
# follows from three things, each looked at again after the bytes have come. The lease held to the end of the copy, by
# this host's clock, which starts before the MetaService's: until then it gives the place to nobody. The MetaService is
# the one that gave the lease; a new one knows of none. And the header is still there, read again after the layers:
# a client that gave the memory and was started again has lost it.


LEASE_S = 30.0
MARGIN_S = 1.0
"""A lease counts as over so long before it is."""
_NO_HEADER = ObjectResult(ObjectStatus.BROKEN, "the header in the pool is not its own")
_GONE = ObjectResult(ObjectStatus.EXPIRED, "another object took its place while it was read")


class MemcacheReader(StoreReader):
    """The fetch thread's.

    :param slack: by so many bytes less one an object may be larger in the pool than it is; see the writer.
    """

    def __init__(self, calls: MemcacheClient, meta: Service, slack: int) -> None:
        super().__init__(calls, meta)
        self._calls, self._slack = calls, slack
        self._open: dict[tuple[bytes, int], OpenRead] = {}  # by key and place in the arena: jobs share nothing
        self.scratch: HeaderBuffer | None = None

    def _lease(self, places: Sequence[ObjectLocation], generation: int) -> list[ObjectResult]:
        """Two calls to the MetaService, whatever the number of objects; up to three more after lost races."""
        began = time.monotonic()
        names = [pool_name(place.key) for place in places]
        results = [leasing(code) for code in self._codes(names)]
        leased = [at for at, result in enumerate(results) if result is OK]
        refused = [names[at] for at in leased]
        try:
            infos = self._calls.info(refused, complete=True)
            refused = []
            for at, info in zip(leased, infos, strict=True):
                place = places[at]
                if not 0 <= info.nbytes - place.nbytes < self._slack:
                    results[at] = OTHER_SIZE
                    refused.append(names[at])
                    continue
                if (place.key, place.offset) in self._open:
                    refused.append(names[at])  # it holds a lease already; the new one counts
                self._open[place.key, place.offset] = OpenRead(generation, began + LEASE_S - MARGIN_S, info.gva)
        finally:
            self._calls.unlease(refused)
        return results

    def forget(self) -> None:
        """See :meth:`StoreReader.forget`."""
        super().forget()
        self._open.clear()

    def lease(self, place: ObjectLocation) -> tuple[int, float] | None:
        """Address of an opened object in the pool, and until when it may be read; for who copies it by other ways."""
        lease = self._open.get((place.key, place.offset))
        return None if lease is None else (lease.address, lease.expires_at)

    def correct(self, names: Sequence[str] = ()) -> set[str]:
        """Return of keys that lost a race those that the winner has published: they can be read now. Any thread.

        The client takes a key for unfinished that it tried to allocate, where another writer was quicker, and its
        place for taken, for as long as the lease it got by that. Once the MetaService says that the other has
        published it, "finishing" it changes nothing there, and corrects the client.

        :param names: only these; none = all.
        """
        lost = [name for name in self._calls.lost() if not names or name in names]
        infos = self._calls.info(lost, complete=True)
        published = [name for name, info in zip(lost, infos, strict=True) if info.nbytes]
        self._calls.finish(published)
        self._calls.forget_lost(published)
        return set(published)

    def _codes(self, names: list[str]) -> list[int]:
        """Return the MetaService's code for a lease of each."""
        codes = self._calls.lease(names, round(LEASE_S * 1e3))
        refused = [name for name, code in zip(names, codes, strict=True) if code == WRONG_STATE]
        if not refused:
            return codes
        try:
            corrected = self.correct(refused)
            again = [at for at, name in enumerate(names) if name in corrected]
            leased = self._calls.lease([names[at] for at in again], round(LEASE_S * 1e3))
        except Unreachable:
            self._calls.unlease([name for name, code in zip(names, codes, strict=True) if code == 0])
            raise
        for at, code in zip(again, leased, strict=True):
            codes[at] = code
        return codes

    def _opened(self, place: ObjectLocation) -> OpenRead | None:
        return self._open.get((place.key, place.offset))

    def _unlease(self, places: Sequence[ObjectLocation]) -> None:
        """The answer does not wait for the MetaService."""
        ended = [pool_name(place.key) for place in places if self._open.pop((place.key, place.offset), None)]
        self._calls.unlease(ended)

    def _copy(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """The layers, and then the headers once more: the verdict is OK only for what is certain."""
        leases = [self._open[place.key, place.offset] for place in places]
        spans: list[AddressRange] = []
        for place, lease in zip(places, leases, strict=True):
            start, stop = place.start(lo) if lo else 0, place.start(hi)
            spans.append(AddressRange(lease.address + start, place.address + start, stop - start))
        results = [reading(code) for code in self._calls.copy(spans, G2H, until)]
        copied = [at for at, result in enumerate(results) if result is OK]
        assert self.scratch is not None
        headers = self.scratch.read([leases[at].address for at in copied], until)
        for at, (code, header) in zip(copied, headers, strict=True):
            results[at] = reading(code)
            if code == 0 and not is_header(header, places[at]):
                results[at] = _GONE if lo else _NO_HEADER
        return results


def is_header(raw: bytes, place: ObjectLocation) -> bool:
    """Whether `raw` is this object's header; tokens and checksum are not known here."""
    mine = pack_header(place.key, blocks=place.blocks, tokens=0, payload=place.layers * place.layer_bytes)
    return raw[:12] == mine[:12] and raw[16:48] == mine[16:48]


# Saving into memcache: room first, layers in order, the header last.


_MANY = 4096


@dataclass(slots=True)
class _FirstSeen:
    info: ObjectInfo
    since: float


class StaleAllocations:
    """Remembers what was seen unfinished, and removes what has been so for longer than any writer may take.

    :param after_s: longer than a write's lease: its owner, if it lives, has stopped by then.
    """

    def __init__(self, calls: MemcacheClient, after_s: float) -> None:
        self._calls, self._after_s = calls, after_s
        self._seen: dict[str, _FirstSeen] = {}

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
                self._seen[name] = _FirstSeen(there[name], now)
            elif now - sight.since > self._after_s:
                over.append(name)
                del self._seen[name]
        if len(self._seen) > _MANY:  # the oldest; dictionaries keep their order
            for name in list(self._seen)[: _MANY // 2]:
                del self._seen[name]
        if over:
            self._calls.count("abandoned_removed", len(over))
        return {name for name, code in zip(over, self._calls.remove(over), strict=True) if code == 0}


ROOM_LEASE_S = 60.0
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
        self._abandoned = StaleAllocations(calls, ABANDONED_S)
        self._claimed: set[bytes] = set()  # allocated by earlier attempts of this call, but not addressed yet
        self.number = 0
        self.scratch: HeaderBuffer | None = None

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
        gvas = self._calls.allocate(wanted, [sizes[at] for at in absent], round(ROOM_LEASE_S * 1e3))
        owned: list[tuple[int, int]] = []
        for at, gva, info in zip(absent, gvas, self._calls.info(wanted, complete=False), strict=True):
            place = places[at]
            if not info.nbytes:
                results[at] = FULL
            elif info.nbytes != sizes[at]:
                results[at] = _QUICKER
                self._calls.count("lost_races")
                self._calls.lose(names[at], began + ROOM_LEASE_S + MARGIN_S)
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
            self._open[places[at].key] = OpenWrite(places[at].offset, generation, began + ROOM_LEASE_S - MARGIN_S, gva)
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

    def _copy_headers(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """All but the generation word: opening has written zeros there, and publishing reads that back."""
        return self._copy(places, [(0, GENERATION_AT)] * len(places), until)

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
            if header != stored_header(self.arena.view, places[at].offset):
                results[at] = _NOT_WRITTEN
                self._calls.count("skipped_writes")
        return results

    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """Give back the memory of writes; it stays taken until the lease has run out."""
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


JOINS = 3
_COUNTED = (
    "metadata_calls",
    "copy_calls",
    "failed_calls",
    "full_retries",
    "expired_leases",
    "leases_left",
    "failed_revokes",
    "lost_races",
    "abandoned_removed",
    "skipped_writes",
)


class Memcache(SharedStore[MemcacheClient, MemcacheReader, MemcacheWriter]):
    """A client of a pool; with memory of its own (`dram_size`), also one of those who give it memory.

    :param options: of ``[pool.memcache]``; see :class:`MemcacheOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MemcacheOptions.read(options)
        self._shared = shared(self._options)
        meta = MetaService(self._shared.meta_service_url, self._shared.metrics_url)
        calls = MemcacheClient(meta, self._options.timeout_ms / 1e3)
        super().__init__(
            "memcache",
            calls,
            meta,
            reader=MemcacheReader(calls, meta, self._shared.world_size),
            writer=MemcacheWriter(calls, meta),
            counted=_COUNTED,
        )

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        for _ in range(JOINS):
            attached = self._join(arena)
            assert self._reader.scratch is not None
            if reaches_all(self._calls, self._reader.scratch):
                return attached
        raise Unreachable(
            f"memcache: this client joined {JOINS} times, and never reached the memory of all the others; restart what "
            "gives memory to the pool, one by one"
        )

    def check(self) -> None:
        self._service.check(self._calls.probe)
        self._calls.give_back()
        self._reader.correct()

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"meta_services_lost": self._service.lost}

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._service.reach()
        return [code == 1 for code in self._calls.exists([pool_name(key) for key in keys], until)]

    def hide(self, keys: Sequence[bytes]) -> None:
        """Only what is complete: an unfinished one is being written again. Memory under lease is kept until it ends."""
        names = [pool_name(key) for key in keys]
        complete = [name for name, code in zip(names, self._calls.exists(names), strict=True) if code == 1]
        self._calls.remove(complete)

    def _register(self, arena: SharedMemory) -> str:
        code = self._calls.register(arena.address, arena.nbytes)
        return explain(code) if code != 0 else ""

    def _join(self, arena: SharedMemory) -> BackendInfo:
        self._start_over()
        client = connect(self._options, self._service)
        self._use(client.store, arena)
        self._reader.scratch = HeaderBuffer(self._calls)
        self._writer.scratch = HeaderBuffer(self._calls)
        self._writer.number = client.number
        return BackendInfo(
            {
                "version": client.version,
                "meta_service": self._shared.meta_service_url,
                "number": client.number,
                "protocol": "as in config_file" if self._options.config_file else self._options.protocol,
                "cann": "emulated" if self._options.cann_emulator else "real",
            }
        )

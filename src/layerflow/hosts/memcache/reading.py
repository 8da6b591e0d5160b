"""Reading from memcache: a lease first, then the address; layers then ask the MetaService nothing.

An address has no identity: it is a place in some client's memory. That what was copied from it is this object
follows from three things, each looked at again after the bytes have come. The lease held to the end of the copy, by
this host's clock, which starts before the MetaService's: until then it gives the place to nobody. The MetaService is
the one that gave the lease; a new one knows of none. And the header is still there, read again after the layers:
a client that gave the memory and was started again has lost it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.memcache.client.client import G2H, AddressRange, MemcacheClient
from layerflow.hosts.memcache.client.codes import WRONG_STATE, leasing, reading
from layerflow.hosts.memcache.client.headers import Scratch
from layerflow.hosts.shared.open_read import OTHER_SIZE, OpenRead, StoreReader
from layerflow.hosts.shared.service import Service
from layerflow.objects import pack_header

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
        self.scratch: Scratch | None = None

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
        """Of keys that lost a race, those that the winner has published: they can be read here now. Any thread.

        The client takes a key for unfinished that it tried to allocate, where another writer was quicker, and its
        place for taken, for as long as the lease it got by that. Once the MetaService says that the other has
        published it, "finishing" it changes nothing there, and corrects the client.

        :param names: only these; none = all.
        """
        lost = [name for name in self._calls.lost() if not names or name in names]
        infos = self._calls.info(lost, complete=True)
        published = [name for name, info in zip(lost, infos, strict=True) if info.nbytes]
        self._calls.finish(published)
        self._calls.settle(published)
        return set(published)

    def _codes(self, names: list[str]) -> list[int]:
        """Of the MetaService, for a lease of each."""
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

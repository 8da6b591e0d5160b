"""Reading from Mooncake: get sessions. Opening asks the master once for all objects; layers then ask it nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, pool_name
from layerflow.hosts.mooncake.client import Master, MooncakeClient, moved, reading

LATE = ObjectResult(ObjectStatus.FAILED, "no time was left for it")
_OTHER_SIZE = ObjectResult(ObjectStatus.MISSING, "it is there with another size")
_NO_SIZE = ObjectResult(ObjectStatus.FAILED, "Mooncake's master did not say how large it is")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is read without having been opened")
_NEW_MASTER = ObjectResult(ObjectStatus.EXPIRED, "Mooncake's master ended, and its leases with it")


@dataclass(slots=True)
class _Session:
    """What the library knows by an object's name: one session, however many jobs read the object.

    :param generation: of the master that gave the lease.
    """

    generation: int
    readers: int = 0


class MooncakeReader:
    """The fetch thread's."""

    def __init__(self, calls: MooncakeClient, master: Master) -> None:
        self._calls, self._master = calls, master
        self._open: dict[bytes, _Session] = {}

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Leases."""
        if not places:
            return []
        if time.monotonic() >= until:
            return [LATE] * len(places)
        generation = self._master.reach()
        names = [pool_name(place.key) for place in places]
        results = [reading(code) for code in self._calls.codes("batch_get_session_start", names)]
        sizes = self._sizes([name for name, result in zip(names, results, strict=True) if result is OK])
        refused: list[str] = []
        for at, (place, name) in enumerate(zip(places, names, strict=True)):
            session = self._open.get(place.key)
            if results[at] is OK and sizes.get(name) != {place.nbytes}:
                results[at] = _OTHER_SIZE if name in sizes else _NO_SIZE
                if session is None:
                    refused.append(name)
            elif results[at] is OK:
                session = self._open.setdefault(place.key, _Session(generation))
                session.generation = generation  # the library's session was replaced, for earlier readers too
                session.readers += 1
        if refused:
            self._calls("batch_get_session_end", refused)
        return results

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """One range an object: its layers lie in one piece, in the store as in the arena."""
        results = [self._readable(place) for place in places]
        wanted = [at for at, result in enumerate(results) if result is OK]
        if not wanted:
            return results
        if time.monotonic() >= until:
            return [LATE if result is OK else result for result in results]
        spans = [(places[at].start(lo) if lo else 0, places[at].start(hi)) for at in wanted]
        codes = self._calls.codes(
            "batch_get_into_multi_buffer_ranges",
            [pool_name(places[at].key) for at in wanted],
            [[places[at].address + start] for at, (start, _) in zip(wanted, spans, strict=True)],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        for at, code, (start, stop) in zip(wanted, codes, spans, strict=True):
            result = reading(moved(code, stop - start))
            # Looked at again after the bytes have come: a new master may have given their room to other objects.
            results[at] = self._readable(places[at]) if result is OK else result
        if expired := sum(result.outcome is ObjectStatus.EXPIRED for result in results):
            self._calls.count("expired_leases", expired)
        return results

    def close(self, places: Sequence[ObjectLocation]) -> None:
        """End the sessions of objects that nobody else reads; the master is not asked."""
        ended: list[str] = []
        for place in places:
            session = self._open.get(place.key)
            if session is None:
                continue
            session.readers -= 1
            if not session.readers:
                del self._open[place.key]
                ended.append(pool_name(place.key))
        if ended:
            self._calls("batch_get_session_end", ended)

    def forget(self) -> None:
        """The client they were opened with is gone."""
        self._open.clear()

    def _readable(self, place: ObjectLocation) -> ObjectResult:
        session = self._open.get(place.key)
        if session is None:
            return _NOT_OPEN
        return OK if session.generation == self._master.generation else _NEW_MASTER

    def _sizes(self, names: list[str]) -> dict[str, set[int]]:
        """Bytes of each object, as its copies in memory have it; one call."""
        copies = self._calls("batch_get_replica_desc", names) if names else {}
        return {
            name: {
                each.get_memory_descriptor().buffer_descriptor.size for each in each_object if each.is_memory_replica()
            }
            for name, each_object in copies.items()
        }

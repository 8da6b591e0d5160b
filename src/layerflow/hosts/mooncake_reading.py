"""Reading from Mooncake: get sessions. Opening asks the master once for all objects; layers then ask it nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import OK, Outcome, Place, Verdict, pool_name
from layerflow.hosts.mooncake_calls import Calls
from layerflow.hosts.mooncake_codes import moved, reading
from layerflow.hosts.mooncake_master import Master

LATE = Verdict(Outcome.FAILED, "no time was left for it")
_OTHER_SIZE = Verdict(Outcome.MISSING, "it is there with another size")
_NO_SIZE = Verdict(Outcome.FAILED, "Mooncake's master did not say how large it is")
_NOT_OPEN = Verdict(Outcome.FAILED, "it is read without having been opened")
_NEW_MASTER = Verdict(Outcome.EXPIRED, "Mooncake's master ended, and its leases with it")


@dataclass(slots=True)
class _Session:
    """What the library knows by an object's name: one session, however many jobs read the object.

    :param term: of the master that gave the lease.
    """

    term: int
    readers: int = 0


class Reader:
    """The fetch thread's."""

    def __init__(self, calls: Calls, master: Master) -> None:
        self._calls, self._master = calls, master
        self._open: dict[bytes, _Session] = {}

    def open(self, places: Sequence[Place], until: float) -> list[Verdict]:
        """Leases."""
        if not places:
            return []
        if time.monotonic() >= until:
            return [LATE] * len(places)
        term = self._master.reach()
        names = [pool_name(place.key) for place in places]
        verdicts = [reading(code) for code in self._calls.codes("batch_get_session_start", names)]
        sizes = self._sizes([name for name, verdict in zip(names, verdicts, strict=True) if verdict is OK])
        refused: list[str] = []
        for at, (place, name) in enumerate(zip(places, names, strict=True)):
            session = self._open.get(place.key)
            if verdicts[at] is OK and sizes.get(name) != {place.nbytes}:
                verdicts[at] = _OTHER_SIZE if name in sizes else _NO_SIZE
                if session is None:
                    refused.append(name)
            elif verdicts[at] is OK:
                session = self._open.setdefault(place.key, _Session(term))
                session.term = term  # the library's session was replaced, for earlier readers too
                session.readers += 1
        if refused:
            self._calls("batch_get_session_end", refused)
        return verdicts

    def fetch(self, places: Sequence[Place], lo: int, hi: int, until: float) -> list[Verdict]:
        """One range an object: its layers lie in one piece, in the store as in the arena."""
        verdicts = [self._readable(place) for place in places]
        wanted = [at for at, verdict in enumerate(verdicts) if verdict is OK]
        if not wanted:
            return verdicts
        if time.monotonic() >= until:
            return [LATE if verdict is OK else verdict for verdict in verdicts]
        spans = [(places[at].start(lo) if lo else 0, places[at].start(hi)) for at in wanted]
        codes = self._calls.codes(
            "batch_get_into_multi_buffer_ranges",
            [pool_name(places[at].key) for at in wanted],
            [[places[at].address + start] for at, (start, _) in zip(wanted, spans, strict=True)],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        for at, code, (start, stop) in zip(wanted, codes, spans, strict=True):
            verdict = reading(moved(code, stop - start))
            # Looked at again after the bytes have come: a new master may have given their room to other objects.
            verdicts[at] = self._readable(places[at]) if verdict is OK else verdict
        if expired := sum(verdict.outcome is Outcome.EXPIRED for verdict in verdicts):
            self._calls.count("expired_leases", expired)
        return verdicts

    def close(self, places: Sequence[Place]) -> None:
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

    def _readable(self, place: Place) -> Verdict:
        session = self._open.get(place.key)
        if session is None:
            return _NOT_OPEN
        return OK if session.term == self._master.term else _NEW_MASTER

    def _sizes(self, names: list[str]) -> dict[str, set[int]]:
        """Bytes of each object, as its copies in memory have it; one call."""
        copies = self._calls("batch_get_replica_desc", names) if names else {}
        return {
            name: {
                each.get_memory_descriptor().buffer_descriptor.size for each in each_object if each.is_memory_replica()
            }
            for name, each_object in copies.items()
        }

"""Writing to Mooncake: put sessions. An object is visible when its session has ended well, and not before.

The library publishes whatever part of an object was written, so the layers are counted here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.mooncake.client import (
    EXISTS,
    INVALID,
    NO_ROOM,
    NOT_OURS,
    Master,
    MooncakeClient,
    moved,
    opening,
    writing,
)
from layerflow.hosts.mooncake.reading import LATE
from layerflow.objects import HEADER_BYTES

FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
"""A full store evicts by itself, in the background, once a put has found it full."""
SESSION_S = 300.0
"""A session older than this writes no more: after `put_start_release_timeout_sec` (by default 600) the master
gives its room to others, and writes into it would still succeed."""
QUARANTINE_S = 60.0
"""So long the room of a write that failed under way stays taken: what hangs at its owner may still land there."""

_TOO_LARGE = ObjectResult(ObjectStatus.TOO_LARGE, "it is larger than any segment of the store")
_BEING_WRITTEN = ObjectResult(ObjectStatus.EXISTS, "it is being written")
_LANDING = ObjectResult(ObjectStatus.FAILED, "an earlier write of it failed under way, and may still be landing")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it is written without having been opened")
_NEW_MASTER = ObjectResult(ObjectStatus.FAILED, "Mooncake's master ended, and with it the room for this object")
_STALE = ObjectResult(ObjectStatus.FAILED, f"its put session was open for more than {SESSION_S:.0f} s")
_OUT_OF_ORDER = ObjectResult(ObjectStatus.FAILED, "its layers came out of order, or not all")


@dataclass(slots=True)
class _Session:
    """:param layers: so many have been written. :param generation: of the master that gave the room."""

    generation: int
    opened: float
    layers: int = 0


class MooncakeWriter:
    """The write thread's.

    :param replicate: the library's ``ReplicateConfig``.
    """

    def __init__(self, calls: MooncakeClient, master: Master) -> None:
        self._calls, self._master = calls, master
        self.replicate: Any = None
        self._open: dict[bytes, _Session] = {}
        self._landing: dict[bytes, float] = {}  # until when their room stays taken

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Room, tried again while the store evicts."""
        self._free_landed()
        results: dict[int, ObjectResult] = {}
        pending: dict[bytes, int] = {}
        for at, place in enumerate(places):
            if place.key in self._landing:
                results[at] = _LANDING
            elif place.key in self._open or place.key in pending:
                results[at] = _BEING_WRITTEN
            else:
                pending[place.key] = at
        try:
            self._take(places, list(pending.values()), results, until)
        except BaseException:  # it costs all of them: nobody will revoke those that have room
            self.revoke([places[at] for at in pending.values()])
            raise
        return [results[at] for at in range(len(places))]

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """One range an object, without its header."""
        results = [self._writable(place, lo) for place in places]
        spans = [(place.start(lo), place.start(hi)) for place in places]
        results = self._put(places, spans, results, until)
        for place, result in zip(places, results, strict=True):
            if result is OK:
                self._open[place.key].layers = hi
        return results

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """The headers, then the end of the sessions."""
        results = [self._writable(place, place.layers) for place in places]
        results = self._put(places, [(0, HEADER_BYTES)] * len(places), results, until)
        ready = [at for at, result in enumerate(results) if result is OK]
        lost: list[ObjectLocation] = [place for place, result in zip(places, results, strict=True) if result is not OK]
        try:
            if ready:
                names = [pool_name(places[at].key) for at in ready]
                for at, code in zip(ready, self._calls.codes("batch_put_session_end", names), strict=True):
                    results[at] = writing(code)
                    if code == 0:
                        del self._open[places[at].key]
                    else:
                        lost.append(places[at])
                    if code == NOT_OURS:
                        self._calls.count("sessions_taken_over")
        finally:
            self.revoke(lost)
            for at in ready:
                self._open.pop(places[at].key, None)
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Give the room back; what may still be landing there keeps it for a while."""
        ended = [place.key for place in places if self._open.pop(place.key, None)]
        self._revoke([key for key in ended if key not in self._landing])

    def forget(self) -> None:
        """The client they were opened with is gone."""
        self._open.clear()
        self._landing.clear()

    def _take(
        self, places: Sequence[ObjectLocation], wanted: list[int], results: dict[int, ObjectResult], until: float
    ) -> None:
        """Room for the objects at these positions; adds their verdicts."""
        pause = FIRST_RETRY_S
        while wanted and time.monotonic() < until:
            generation = self._master.reach()
            codes = self._start([places[at] for at in wanted])
            now = time.monotonic()
            for at, code in zip(wanted, codes, strict=True):
                results[at] = opening(code)
                if code == 0:
                    self._open[places[at].key] = _Session(generation, now)
            wanted = [at for at, code in zip(wanted, codes, strict=True) if code == NO_ROOM]
            largest = self._master.largest_segment() if wanted else 0
            if largest:
                results |= {at: _TOO_LARGE for at in wanted if places[at].nbytes > largest}
                wanted = [at for at in wanted if results[at] is not _TOO_LARGE]
            if wanted:
                self._calls.count("full_retries", len(wanted))
                time.sleep(max(0.0, min(pause, until - time.monotonic())))
                pause = min(2 * pause, LAST_RETRY_S)
        for at in wanted:
            results.setdefault(at, LATE)

    def _start(self, places: Sequence[ObjectLocation]) -> list[int]:
        names, sizes = [pool_name(place.key) for place in places], [place.nbytes for place in places]
        codes = self._calls.codes("batch_put_session_start", names, sizes, self.replicate)
        # The library keeps a session whose end the master refused or did not hear, and starts no other one of its name.
        left = [at for at, code in enumerate(codes) if code == INVALID]
        if left:
            revoked = self._calls.codes("batch_put_session_revoke", [names[at] for at in left])
            for at, code in zip(left, revoked, strict=True):
                codes[at] = EXISTS if code == NOT_OURS else code
            left = [at for at in left if codes[at] == 0]
        if left:
            again = self._calls.codes(
                "batch_put_session_start", [names[at] for at in left], [sizes[at] for at in left], self.replicate
            )
            for at, code in zip(left, again, strict=True):
                codes[at] = code
        return codes

    def _writable(self, place: ObjectLocation, layers: int) -> ObjectResult:
        session = self._open.get(place.key)
        if session is None:
            return _NOT_OPEN
        if place.key in self._landing:
            return _LANDING
        if session.layers != layers:
            return _OUT_OF_ORDER
        if session.generation != self._master.generation:
            return _NEW_MASTER
        return _STALE if time.monotonic() - session.opened > SESSION_S else OK

    def _put(
        self,
        places: Sequence[ObjectLocation],
        spans: Sequence[tuple[int, int]],
        results: list[ObjectResult],
        until: float,
    ) -> list[ObjectResult]:
        """Copy a span of each object whose verdict is OK so far."""
        wanted = [at for at, result in enumerate(results) if result is OK]
        if not wanted:
            return results
        if time.monotonic() >= until:
            return [LATE if result is OK else result for result in results]
        codes = self._calls.codes(
            "batch_put_from_multi_buffer_ranges",
            [pool_name(places[at].key) for at in wanted],
            [[places[at].address + spans[at][0]] for at in wanted],
            [[spans[at][1] - spans[at][0]] for at in wanted],
            [[spans[at][0]] for at in wanted],
        )
        for at, code in zip(wanted, codes, strict=True):
            results[at] = writing(moved(code, spans[at][1] - spans[at][0]))
            if results[at] is not OK:
                self._landing[places[at].key] = time.monotonic() + QUARANTINE_S
        return results

    def _free_landed(self) -> None:
        now = time.monotonic()
        landed = [key for key, until in self._landing.items() if until <= now]
        for key in landed:
            del self._landing[key]
        self._revoke(landed)

    def _revoke(self, keys: Sequence[bytes]) -> None:
        # Without the master there is nothing to give back; what the library keeps is revoked where it is in the way.
        if not keys or not self._master.generation:
            return
        try:
            self._calls.codes("batch_put_session_revoke", [pool_name(key) for key in keys])
        except Unreachable:
            self._calls.count("failed_revokes", len(keys))

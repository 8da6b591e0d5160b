"""Writing to Mooncake: put sessions. An object is visible when its session has ended well, and not before.

The library publishes whatever part of an object was written, so the layers are counted by :class:`StoreWriter`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from layerflow.hosts.backend import ObjectLocation, ObjectResult, ObjectStatus, Unreachable, pool_name
from layerflow.hosts.mooncake.client import EXISTS, INVALID, NOT_OURS, MooncakeClient, moved, opening, writing
from layerflow.hosts.shared.open_write import OpenWrite, StoreWriter
from layerflow.hosts.shared.service import Service

SESSION_S = 300.0
"""A session older than this writes no more: after `put_start_release_timeout_sec` (by default 600) the master
gives its room to others, and writes into it would still succeed."""
QUARANTINE_S = 60.0
"""So long the room of a write that failed under way stays taken: what hangs at its owner may still land there."""

_LANDING = ObjectResult(ObjectStatus.FAILED, "an earlier write of it failed under way, and may still be landing")


class MooncakeWriter(StoreWriter):
    """The write thread's.

    :ivar replicate: the library's ``ReplicateConfig``.
    """

    def __init__(self, calls: MooncakeClient, master: Service) -> None:
        super().__init__(calls, master)
        self._calls = calls
        self.replicate: Any = None
        self._landing: dict[bytes, float] = {}  # until when their room stays taken

    def forget(self) -> None:
        """See :meth:`StoreWriter.forget`."""
        super().forget()
        self._landing.clear()

    def check(self, place: ObjectLocation, layers: int | None = None) -> ObjectResult:
        """See :meth:`StoreWriter.check`."""
        return _LANDING if place.key in self._landing else super().check(place, layers)

    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self._free_landed()
        results = [_LANDING] * len(places)
        generation, free = (
            self._service.reach(),
            [at for at, place in enumerate(places) if place.key not in self._landing],
        )
        now = time.monotonic()
        for at, code in zip(free, self._start([places[at] for at in free]), strict=True):
            results[at] = opening(code)
            if code == 0:
                self._open[places[at].key] = OpenWrite(generation, now + SESSION_S)
        return results

    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        codes = self._calls.codes(
            "batch_put_from_multi_buffer_ranges",
            [pool_name(place.key) for place in places],
            [[place.address + start] for place, (start, _) in zip(places, spans, strict=True)],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        codes = [moved(code, stop - start) for code, (start, stop) in zip(codes, spans, strict=True)]
        quarantined = time.monotonic() + QUARANTINE_S
        self._landing |= {place.key: quarantined for place, code in zip(places, codes, strict=True) if code != 0}
        return [writing(code) for code in codes]

    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        codes = self._calls.codes("batch_put_session_end", [pool_name(place.key) for place in places])
        if taken := codes.count(NOT_OURS):
            self._calls.count("sessions_taken_over", taken)
        return [writing(code) for code in codes]

    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """What may still be landing keeps its room for a while."""
        self._revoke([key for key in ended if key not in self._landing])

    def _start(self, places: Sequence[ObjectLocation]) -> list[int]:
        if not places:
            return []
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

    def _free_landed(self) -> None:
        now = time.monotonic()
        landed = [key for key, until in self._landing.items() if until <= now]
        for key in landed:
            del self._landing[key]
        try:
            self._revoke(landed)
        except Unreachable:
            self._calls.count("failed_revokes", len(landed))

    def _revoke(self, keys: Sequence[bytes]) -> None:
        # Without the master there is nothing to give back; what the library keeps is revoked where it is in the way.
        if keys and self._service.generation:
            self._calls.codes("batch_put_session_revoke", [pool_name(key) for key in keys])

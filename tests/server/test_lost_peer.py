"""A peer is lost while several fetches read one lease, and the end of one ends the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from layerflow.flow.events import Event, IncomingFailed
from layerflow.pool.base import NewObject
from layerflow.server.incoming import IncomingObjects
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.questions import Offers, RemoteLease
from layerflow.server.peers.source import PeerSource

FETCHES = (3, 4, 5)


class Source:
    """What giving up touches; the core ends all fetches of a load with the first that fails."""

    def __init__(self) -> None:
        self.offers = Offers()
        self.failures: Counter[str] = Counter()
        self.lease = RemoteLease(cast(PeerAttachment, None), 1, b"", b"", 10.0, 10.0, fetches=set(FETCHES))
        objects = {number: [NewObject(bytes([number]) * 24, 64, 1, 16)] for number in FETCHES}
        self._incoming = cast(IncomingObjects, SimpleNamespace(positions=lambda number: [*range(len(objects[number]))]))
        self.told: list[Event] = []
        self._objects = objects

    def _emit(self, events: Sequence[Event]) -> None:
        self.told += events
        self._objects.clear()
        self.lease.fetches.clear()


def test_a_fetch_that_another_has_ended_is_not_failed_again() -> None:
    source: Any = Source()
    PeerSource._give_up(source, source.lease, "it is silent")
    assert [type(event) for event in source.told] == [IncomingFailed]
    assert source.lease.over

"""Writers of a shared store whose layers were written by other ways than through the arena."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.store import OpenWrite, StoreWriter
from layerflow.system.memfd import SharedMemory

KEY = bytes(24)
LAYER_BYTES, LAYERS = 4096, 2


class Service:
    """One that is there."""

    generation = 1


class Shelf(StoreWriter):
    """A store in memory. :ivar lease_s: of the room that is given from now on."""

    lease_s = 60.0

    def __init__(self) -> None:
        service: Any = Service()
        super().__init__(ClientHandle("away"), service)
        self.arena = SharedMemory.create(1 << 16)
        self.published: list[bytes] = []
        self.given_back: list[bytes] = []

    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        for place in places:
            self._open[place.key] = OpenWrite(place.offset, 1, time.monotonic() + self.lease_s)
        return [OK] * len(places)

    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        return [OK] * len(places)

    def _copy_headers(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return [OK] * len(places)

    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self.published += [place.key for place in places]
        return [OK] * len(places)

    def _give_back(self, ended: Mapping[bytes, OpenWrite]) -> None:
        self.given_back += ended


def place(at: int) -> ObjectLocation:
    return ObjectLocation(KEY, at, 0, LAYER_BYTES, LAYERS, 2, 32)


@pytest.fixture
def until() -> float:
    return time.monotonic() + 60.0


def test_a_job_that_lost_its_room_publishes_nothing_of_the_job_that_has_it_now(until: float) -> None:
    shelf, first, second, header = Shelf(), place(1), place(2), place(64)
    shelf.lease_s = 0.0
    assert shelf.open([first], until) == [OK]
    shelf.lease_s = 60.0
    assert shelf.open([second], until) == [OK] and shelf.given_back == [KEY]
    shelf.landed([first], [header])
    assert shelf.commit([header], until) != [OK] and not shelf.published
    shelf.landed([second], [header])
    assert shelf.commit([header], until) == [OK] and shelf.published == [KEY] and shelf.given_back == [KEY]

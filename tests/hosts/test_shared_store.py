"""What readers and writers of shared stores have in common, over a store that is a dictionary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.store import FULL, OpenRead, OpenWrite, StoreReader, StoreWriter
from layerflow.objects import HEADER_BYTES, get_checksum, pack_header, stored_header
from layerflow.system.memfd import SharedMemory

LAYERS, LAYER_BYTES = 4, 256
HALF = 4096
FOREVER = float("inf")


@dataclass
class Pool:
    """The store, and its metadata service. `room`: attempts that find it full, then there is room."""

    generation: int = 1
    ill: str = ""
    uncopied: str = ""
    largest: int = 0
    room: list[int] = field(default_factory=list)
    published: dict[bytes, bytearray] = field(default_factory=dict)
    unfinished: dict[bytes, bytearray] = field(default_factory=dict)
    given_back: list[bytes] = field(default_factory=list)

    def largest_segment(self) -> int:
        return self.largest

    def reach(self) -> int:
        return self.generation


class Writer(StoreWriter):
    def __init__(self, pool: Pool, arena: SharedMemory) -> None:
        super().__init__(ClientHandle(""), pool)  # type: ignore[arg-type]
        self.pool, self.arena, self.expires_at = pool, arena, FOREVER

    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        short = self.pool.room.pop(0) if self.pool.room else 0
        if short < 0:
            raise Unreachable("it is away")
        for place in places[short:]:
            self.pool.unfinished[place.key] = bytearray(place.nbytes)
            self._open[place.key] = OpenWrite(place.offset, self.pool.generation, self.expires_at)
        return [FULL] * min(short, len(places)) + [OK] * len(places[short:])

    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        assert self.arena is not None
        if self.pool.uncopied:
            raise Unreachable(self.pool.uncopied)
        for place, (start, stop) in zip(places, spans, strict=True):
            there = self.arena.view[place.offset + start : place.offset + stop]
            self.pool.unfinished[place.key][start:stop] = there
        return [OK] * len(places)

    def _copy_headers(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        assert self.arena is not None
        if self.pool.uncopied:
            raise Unreachable(self.pool.uncopied)
        for place in places:
            self.pool.unfinished[place.key][:HEADER_BYTES] = stored_header(self.arena.view, place.offset)
        return [OK] * len(places)

    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        if self.pool.ill:
            raise Unreachable(self.pool.ill)
        for place in places:
            self.pool.published[place.key] = self.pool.unfinished.pop(place.key)
        return [OK] * len(places)

    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        self.pool.given_back += ended


class Reader(StoreReader):
    def __init__(self, pool: Pool, arena: SharedMemory) -> None:
        super().__init__(ClientHandle(""), pool)  # type: ignore[arg-type]
        self.pool, self.arena = pool, arena
        self.leases: dict[bytes, OpenRead] = {}

    def _lease(self, places: Sequence[ObjectLocation], generation: int) -> list[ObjectResult]:
        self.leases |= {place.key: OpenRead(generation) for place in places}
        return [OK] * len(places)

    def _opened(self, place: ObjectLocation) -> OpenRead | None:
        return self.leases.get(place.key)

    def _copy(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        assert self.arena is not None
        for place in places:
            start, stop = place.start(lo) if lo else 0, place.start(hi)
            there = self.pool.published[place.key][start:stop]
            self.arena.view[place.offset + start : place.offset + stop] = there
        return [OK] * len(places)

    def _unlease(self, places: Sequence[ObjectLocation]) -> None:
        for place in places:
            del self.leases[place.key]


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    with SharedMemory.create(4 * HALF) as arena:
        yield arena


def place(arena: SharedMemory, name: int, offset: int = 0) -> ObjectLocation:
    return ObjectLocation(bytes([name]) * 24, offset, arena.address + offset, LAYER_BYTES, LAYERS, 1)


def fill(arena: SharedMemory, one: ObjectLocation) -> None:
    """Different bytes in each layer, and the header as the server writes it."""
    for layer in range(LAYERS):
        begin = one.offset + one.start(layer)
        arena.view[begin : begin + LAYER_BYTES] = bytes([layer + 1]) * LAYER_BYTES
    arena.view[one.offset : one.offset + HEADER_BYTES] = pack_header(one.key, blocks=1, tokens=16, payload=1024)


def stored(arena: SharedMemory, pool: Pool) -> ObjectLocation:
    writer, one = Writer(pool, arena), place(arena, 1)
    fill(arena, one)
    assert writer.open([one], FOREVER) == [OK]
    for lo, hi in ((0, 1), (1, 3), (3, LAYERS)):
        assert writer.write([one], lo, hi, FOREVER) == [OK]
    assert writer.commit([one], FOREVER) == [OK]
    return place(arena, 1, HALF)


@pytest.mark.parametrize("steps", [(1, 2, 4), (4,), (1, 4)])
@pytest.mark.parametrize("spoilt", range(LAYERS))
def test_a_byte_that_changed_in_any_layer_is_found_with_the_last(arena, steps, spoilt):
    pool = Pool()
    theirs = stored(arena, pool)
    assert get_checksum(bytes(pool.published[theirs.key][:HEADER_BYTES]))
    for wrong in (False, True):
        if wrong:
            pool.published[theirs.key][theirs.start(spoilt)] ^= 1
        reader, lo = Reader(pool, arena), 0
        assert reader.open([theirs], FOREVER) == [OK]
        for hi in steps:
            [result] = reader.fetch([theirs], lo, hi, FOREVER)
            assert result.outcome is (ObjectStatus.BROKEN if wrong and hi == LAYERS else ObjectStatus.OK)
            lo = hi
        reader.close([theirs])


def test_without_a_checksum_there_is_nothing_to_compare(arena):
    pool = Pool()
    theirs = stored(arena, pool)
    pool.published[theirs.key][48:56] = bytes(8)
    pool.published[theirs.key][-1] ^= 1
    reader = Reader(pool, arena)
    assert reader.open([theirs], FOREVER) == [OK]
    assert reader.fetch([theirs], 0, LAYERS, FOREVER) == [OK]


def test_a_lease_ends_with_its_service_and_with_its_time(arena):
    pool = Pool()
    theirs = stored(arena, pool)
    reader = Reader(pool, arena)
    assert reader.fetch([theirs], 0, 1, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert reader.open([theirs], FOREVER) == [OK]
    pool.generation += 1
    assert reader.fetch([theirs], 0, 1, FOREVER)[0].outcome is ObjectStatus.EXPIRED
    reader.leases[theirs.key] = OpenRead(pool.generation, time.monotonic())
    assert reader.fetch([theirs], 0, 1, FOREVER)[0].outcome is ObjectStatus.EXPIRED


def test_a_full_store_is_tried_again_and_what_is_too_large_is_not(arena):
    pool = Pool(room=[2, 1, 0])
    writer, places = Writer(pool, arena), [place(arena, name) for name in range(3)]
    assert writer.open(places, FOREVER) == [OK] * 3
    assert not pool.room
    pool.largest, pool.room = 8, [1]
    assert writer.open([place(arena, 9)], FOREVER)[0].outcome is ObjectStatus.TOO_LARGE
    pool.largest, pool.room = 0, [1] * 1000
    assert writer.open([place(arena, 9)], time.monotonic() + 1.0)[0].outcome is ObjectStatus.FULL


def test_one_key_is_written_once_at_a_time(arena):
    writer, one = Writer(Pool(), arena), place(arena, 1)
    assert [result.outcome for result in writer.open([one, one], FOREVER)] == [ObjectStatus.OK, ObjectStatus.EXISTS]
    assert writer.open([one], FOREVER)[0].outcome is ObjectStatus.EXISTS
    writer.revoke([one])
    assert writer.open([one], FOREVER) == [OK]


def test_a_service_that_goes_while_the_store_is_full_leaves_nothing_open(arena):
    """What stayed open could never be written again."""
    pool = Pool(room=[1, -1])
    writer, places = Writer(pool, arena), [place(arena, name) for name in range(3)]
    with pytest.raises(Unreachable):
        writer.open(places, FOREVER)
    assert pool.given_back == [places[1].key, places[2].key]
    assert writer.open(places, FOREVER) == [OK] * 3


def test_layers_come_in_order_in_time_and_to_the_service_that_gave_the_room(arena):
    pool = Pool()
    writer, one = Writer(pool, arena), place(arena, 1)
    fill(arena, one)
    assert writer.write([one], 0, 1, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert writer.open([one], FOREVER) == writer.write([one], 0, 1, FOREVER) == [OK]
    assert writer.write([one], 2, 3, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert writer.commit([one], FOREVER)[0].outcome is ObjectStatus.FAILED
    assert pool.given_back == [one.key]
    assert writer.open([one], FOREVER) == [OK]
    pool.generation += 1
    assert writer.write([one], 0, 1, FOREVER)[0].outcome is ObjectStatus.FAILED
    writer.revoke([one])
    writer.expires_at = time.monotonic()
    assert writer.open([one], FOREVER) == [OK]
    assert writer.write([one], 0, 1, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert not pool.published


def test_a_commit_that_was_not_answered_is_neither_open_nor_given_back(arena):
    pool = Pool()
    writer, one = Writer(pool, arena), place(arena, 1)
    fill(arena, one)
    assert writer.open([one], FOREVER) == writer.write([one], 0, LAYERS, FOREVER) == [OK]
    pool.ill = "it hangs"
    with pytest.raises(Unreachable):
        writer.commit([one], FOREVER)
    assert not pool.given_back, "it may be complete all the same"
    pool.ill = ""
    assert writer.open([one], FOREVER) == [OK]


def test_a_store_that_goes_before_a_commit_publishes_leaves_nothing_open(arena):
    pool = Pool()
    writer, places = Writer(pool, arena), [place(arena, name) for name in range(2)]
    for one in places:
        fill(arena, one)
    assert writer.open(places, FOREVER) == writer.write(places, 0, LAYERS, FOREVER) == [OK] * 2
    pool.uncopied = "it is away"
    with pytest.raises(Unreachable):
        writer.commit(places, FOREVER)
    assert pool.given_back == [one.key for one in places] and not pool.published
    pool.uncopied = ""
    assert writer.open(places, FOREVER) == [OK] * 2


def test_who_has_lost_its_room_is_no_writer(arena):
    """Whoever opened it may be gone without a word."""
    pool = Pool()
    writer, one = Writer(pool, arena), place(arena, 1)
    writer.expires_at = time.monotonic()
    assert writer.open([one], FOREVER) == [OK]
    writer.expires_at = FOREVER
    assert writer.open([one], FOREVER) == [OK]
    assert pool.given_back == [one.key]
    assert writer.open([one], FOREVER)[0].outcome is ObjectStatus.EXISTS


def test_a_job_whose_room_ran_out_does_not_touch_that_of_the_next_one(arena):
    """The checksum would vouch for the mixture of their layers."""
    pool = Pool()
    writer, first, second = Writer(pool, arena), place(arena, 1), place(arena, 1, HALF)
    fill(arena, first)
    fill(arena, second)
    arena.view[first.offset + HEADER_BYTES : first.offset + first.nbytes] = bytes(first.nbytes - HEADER_BYTES)
    writer.expires_at = time.monotonic()
    assert writer.open([first], FOREVER) == [OK]
    writer.expires_at = FOREVER
    assert writer.open([second], FOREVER) == [OK]
    assert writer.write([first], 0, 1, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert writer.write([second], 0, 1, FOREVER) == [OK]
    assert writer.write([first], 1, 2, FOREVER)[0].outcome is ObjectStatus.FAILED
    assert writer.room(first) is None and writer.room(second) is not None
    assert writer.commit([first], FOREVER)[0].outcome is ObjectStatus.FAILED
    writer.revoke([first])
    assert pool.given_back == [first.key], "once, when its own room had run out"
    assert writer.write([second], 1, LAYERS, FOREVER) == writer.commit([second], FOREVER) == [OK]
    there = arena.view[second.offset + HEADER_BYTES : second.offset + second.nbytes]
    assert pool.published[second.key][HEADER_BYTES:] == bytes(there)

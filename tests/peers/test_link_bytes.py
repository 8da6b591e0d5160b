"""Whoever sits between exporter and importer, or whatever spoils what crosses there: no wrong byte counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from layerflow.hosts.backend import ObjectLocation, ObjectStatus
from layerflow.hosts.peer.exporter import Links
from layerflow.hosts.peer.grants import Grants, RangeSeal
from layerflow.hosts.peer.links.tcp import StreamLender, TcpLink
from layerflow.objects import pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Lend
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import HEAD, TAIL, Origin, reader_key_of
from peers.relay import Relay

LAYERS, LAYER_BYTES, COUNT = 3, 4096, 2
EXPORTER_KEY, READER, TOKEN, LEASE_KEY = b"e" * 32, b"r" * 16, b"t" * 16, b"l" * 32
Alter = Callable[[bytearray], None]


class Middle:
    """An exporter with two objects of one lease, an importer's link, and who sits between them."""

    def __init__(self) -> None:
        self.source, self.target = SharedMemory.create(1 << 20), SharedMemory.create(1 << 20)
        grants = Grants(lambda lease: None, self.source.nbytes)
        lender, where = StreamLender(self.source), ("127.0.0.1", 0)
        links = Links(
            self.source,
            lender,
            grants,
            address=where,
            incarnation=b"i" * 16,
            exporter_key=EXPORTER_KEY,
            ended=lambda: None,
        )
        links.start()
        self.places = []
        for at in range(COUNT):
            place = ObjectLocation(bytes([at + 1]) * 24, at << 16, 0, LAYER_BYTES, LAYERS, 2, 16, position=at)
            header = pack_header(place.key, blocks=2, tokens=16, payload=LAYERS * LAYER_BYTES)
            self.source.view[place.offset : place.offset + place.nbytes] = header + os.urandom(LAYERS * LAYER_BYTES)
            self.places.append(place)
        sizes = pack_u64([place.nbytes for place in self.places])
        offsets = pack_u64([place.offset for place in self.places])
        keys = b"".join(place.key for place in self.places)
        positions, blocks = pack_u32(range(COUNT)), pack_u32([2] * COUNT)
        grants.lend(Lend(7, TOKEN, positions, keys, offsets, sizes, blocks, sizes, LEASE_KEY))
        self.relay = Relay(f"127.0.0.1:{links.port}")
        key = reader_key_of(EXPORTER_KEY, READER)
        self.origin = Origin("p", "tcp", f"127.0.0.1:{self.relay.port}", b"i" * 16, READER, key, TOKEN, LEASE_KEY)
        self.link = TcpLink(self.target.view, self.origin, time.monotonic() + 10)

    def read(self, lo: int, hi: int, alter: Alter | None = None) -> list[ObjectStatus]:
        """What becomes of the layers `lo` to `hi` of both objects; `alter` is given the whole answer."""
        whole, came = COUNT * (HEAD.size + (hi - lo) * LAYER_BYTES + TAIL.size), bytearray()

        def gathered(data: bytes) -> bytes:
            came.extend(data)
            if len(came) < whole:
                return b""
            if alter is not None:
                alter(came)
            return bytes(came)

        self.relay.alter = gathered
        found = self.link.read(self.origin, self.places, lo, hi, time.monotonic() + 10)
        return [result.outcome for result in found]

    def same(self, lo: int, hi: int) -> bool:
        spans = [slice(place.offset + place.start(lo), place.offset + place.start(hi)) for place in self.places]
        return all(self.source.view[span] == self.target.view[span] for span in spans)


@pytest.fixture
def middle() -> Iterator[Middle]:
    it = Middle()
    yield it
    it.link.close()
    it.relay.close()


DATA = COUNT * HEAD.size


def flip(answer: bytearray) -> None:
    answer[DATA + 100] ^= 4


def swap_objects(answer: bytearray) -> None:
    first, second = slice(DATA, DATA + LAYER_BYTES), slice(DATA + LAYER_BYTES, DATA + 2 * LAYER_BYTES)
    answer[first], answer[second] = answer[second], answer[first]


def swap_with_tags(answer: bytearray) -> None:
    swap_objects(answer)
    tags = DATA + COUNT * LAYER_BYTES
    first, second = slice(tags + 8, tags + TAIL.size), slice(tags + TAIL.size + 8, tags + 2 * TAIL.size)
    answer[first], answer[second] = answer[second], answer[first]


def no_tags(answer: bytearray) -> None:
    for at in range(COUNT):
        end = len(answer) - at * TAIL.size
        answer[end - TAIL.size + 8 : end] = bytes(TAIL.size - 8)


def test_what_crosses_unaltered_counts(middle: Middle) -> None:
    assert middle.read(0, LAYERS) == [ObjectStatus.OK] * COUNT
    assert middle.same(0, LAYERS)


@pytest.mark.parametrize("alter", [swap_objects, swap_with_tags, no_tags])
def test_what_was_altered_on_its_way_is_broken(middle: Middle, alter: Alter) -> None:
    assert middle.read(0, 1, alter) == [ObjectStatus.BROKEN] * COUNT
    assert middle.read(0, 1) == [ObjectStatus.OK] * COUNT, "the link goes on"


def test_one_bit_costs_one_object(middle: Middle) -> None:
    assert middle.read(0, 1, flip) == [ObjectStatus.BROKEN, ObjectStatus.OK]


def test_an_answer_to_an_earlier_request_is_broken(middle: Middle) -> None:
    """Another range of the same objects under the same lease, with tags that were right there."""
    kept = bytearray()
    assert middle.read(0, 1, kept.extend) == [ObjectStatus.OK] * COUNT

    def replay(answer: bytearray) -> None:
        answer[:] = kept

    assert middle.read(1, 2, replay) == [ObjectStatus.BROKEN] * COUNT


def test_a_tag_is_of_its_lease_object_range_and_bytes() -> None:
    data = memoryview(os.urandom(1000))
    seal = RangeSeal(LEASE_KEY, TOKEN)
    tag = seal.tag(b"k" * 24, 64, data)
    assert RangeSeal(LEASE_KEY, TOKEN).fits(tag, b"k" * 24, 64, data)
    assert not RangeSeal(LEASE_KEY, b"u" * 16).fits(tag, b"k" * 24, 64, data)
    assert not RangeSeal(b"m" * 32, TOKEN).fits(tag, b"k" * 24, 64, data)
    for key, start, given in ((b"j" * 24, 64, data), (b"k" * 24, 65, data), (b"k" * 24, 64, data[:-1])):
        assert not seal.fits(tag, key, start, given)
    assert tag != seal.tag(b"k" * 24, 64, data), "a nonce is used once"

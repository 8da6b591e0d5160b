"""The exporter's end of a link, spoken to byte by byte: it gives what was lent and nothing else."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from e2e.known import eventually

from layerflow.hosts.peer.grants import Grants
from layerflow.hosts.peer.links.tcp import StreamLender
from layerflow.hosts.peer.serving import Links
from layerflow.hosts.peer.streams import LinkClosed, receive
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Extend, Lend, pack_u32, pack_u64
from layerflow.wire.peer_link import (
    GONE,
    HEAD,
    HELLO,
    ITEM,
    NOT_YET,
    OUTSIDE,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    TAIL,
    check_hello,
    hello,
)
from peers.conftest import Pair

INCARNATION, TOKEN = b"i" * 16, b"t" * 16
KEY, OFFSET, PAYLOAD = b"k" * 24, 4096, 1 << 16
OPEN_KEY, OPEN_OFFSET = b"o" * 24, 1 << 18


class Exporting:
    """Links over an arena with one whole object, and one that is being stored."""

    def __init__(self) -> None:
        self.arena = SharedMemory.create(1 << 20)
        self.withdrawn: list[int] = []
        self.grants = Grants(self.withdrawn.append, self.arena.nbytes)
        self.links = Links(self.arena, StreamLender(self.arena), self.grants, ("127.0.0.1", 0), INCARNATION)
        self.links.start()
        self.payload = os.urandom(PAYLOAD)
        header = pack_header(KEY, blocks=4, tokens=16, payload=PAYLOAD)
        self.arena.view[OFFSET : OFFSET + HEADER_BYTES + PAYLOAD] = header + self.payload
        nbytes = HEADER_BYTES + PAYLOAD
        places = pack_u64([OFFSET, OPEN_OFFSET]), pack_u64([nbytes, nbytes])
        self.grants.lend(Lend(7, TOKEN, KEY + OPEN_KEY, *places, pack_u32([4, 0]), pack_u64([nbytes, HEADER_BYTES])))

    def connect(self, incarnation: bytes = INCARNATION) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.links.port))
        link.sendall(hello(incarnation))
        assert check_hello(heard(link, HELLO.size)) == INCARNATION
        return link


@pytest.fixture
def exporting() -> Iterator[Exporting]:
    it = Exporting()
    yield it
    it.grants.withdraw(7)


def heard(link: socket.socket, count: int) -> bytes:
    raw = bytearray(count)
    receive(link, [memoryview(raw)], 10.0)
    return bytes(raw)


def ask(link: socket.socket, *items: tuple[int, int, int], token: bytes = TOKEN) -> None:
    table = b"".join(ITEM.pack(position, 0, start, length) for position, start, length in items)
    link.sendall(REQUEST.pack(REQUEST_MAGIC, len(items), token, 0) + table)


def answer(link: socket.socket) -> tuple[int, bytes, int]:
    """Status, bytes, and what is said of them at their end."""
    _, status, count = HEAD.unpack(heard(link, HEAD.size))
    if status != READ:
        return status, b"", status
    data = heard(link, count)
    return status, data, TAIL.unpack(heard(link, TAIL.size))[1]


def test_ranges_of_what_was_lent_are_read(exporting: Exporting) -> None:
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100), (9, 0, 1), (0, HEADER_BYTES + 1000, PAYLOAD - 1000))
        heads = [HEAD.unpack(heard(link, HEAD.size)) for _ in range(3)]
        assert heads == [(0, READ, 100), (9, OUTSIDE, 0), (0, READ, PAYLOAD - 1000)]
        assert heard(link, PAYLOAD - 900) == exporting.payload[:100] + exporting.payload[1000:]
        assert [TAIL.unpack(heard(link, TAIL.size)) for _ in range(2)] == [(0, READ)] * 2


@pytest.mark.parametrize(
    "item",
    [(0, HEADER_BYTES, PAYLOAD + 1), (0, 1 << 40, 1), (2, 0, 1), (1 << 31, 0, 1), (0, 0, 0), (0, 2**63, 2**63)],
)
def test_nothing_else_is(exporting: Exporting, item: tuple[int, int, int]) -> None:
    with exporting.connect() as link:
        ask(link, item)
        assert answer(link)[0] == OUTSIDE


@pytest.mark.parametrize("token", [b"x" * 16, bytes(16)])
def test_a_wrong_token_reads_nothing(exporting: Exporting, token: bytes) -> None:
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100), token=token)
        assert answer(link)[0] == GONE
        ask(link, (0, HEADER_BYTES, 100))
        assert answer(link) == (READ, exporting.payload[:100], READ)


def test_who_looks_for_another_incarnation_is_told_and_hung_up_on(exporting: Exporting) -> None:
    with exporting.connect(b"j" * 16) as link, pytest.raises((LinkClosed, ConnectionResetError)):
        ask(link, (0, HEADER_BYTES, 100))
        answer(link)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), struct.pack("<4sHH16s", b"LFPL", 99, 0, INCARNATION)],
)
def test_garbage_is_hung_up_on(exporting: Exporting, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        link.sendall(garbage)
        with pytest.raises((LinkClosed, ConnectionResetError)):
            heard(link, 1)
    with exporting.connect() as link:
        link.sendall(os.urandom(REQUEST.size))
        with pytest.raises((LinkClosed, ConnectionResetError)):
            heard(link, 1)
    with exporting.connect() as link:
        link.sendall(REQUEST.pack(REQUEST_MAGIC, 1 << 31, TOKEN, 0))
        with pytest.raises((LinkClosed, ConnectionResetError)):
            heard(link, 1)
    assert eventually(lambda: exporting.links.statistics()["links"] == 0)


def test_a_place_that_was_given_to_another_object_does_not_count(exporting: Exporting) -> None:
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, PAYLOAD))
        assert HEAD.unpack(heard(link, HEAD.size))[1] == READ
        heard(link, 1000)
        # What the owner's pool does before anything else is written there.
        exporting.arena.view[OFFSET : OFFSET + HEADER_BYTES] = bytes(HEADER_BYTES)
        ask(link, (0, HEADER_BYTES, 100))
        heard(link, PAYLOAD - 1000)
        heard(link, TAIL.size)  # this one may have been read before
        assert answer(link)[0] == GONE


def test_a_lease_that_is_withdrawn_ends_reads_that_hang(exporting: Exporting) -> None:
    with exporting.connect() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask(link, *[(0, HEADER_BYTES, PAYLOAD)] * 1000)  # more than any buffer takes: the exporter waits for this end
        heard(link, 1000)
        exporting.grants.withdraw(7)
        assert eventually(lambda: exporting.withdrawn == [7])
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100))
        assert answer(link)[0] == GONE


def test_layers_that_are_not_stored_yet_are_not_read(exporting: Exporting) -> None:
    half = PAYLOAD // 2
    exporting.arena.view[OPEN_OFFSET + HEADER_BYTES : OPEN_OFFSET + HEADER_BYTES + half] = exporting.payload[:half]
    with exporting.connect() as link:
        ask(link, (1, HEADER_BYTES, half))
        assert answer(link)[0] == NOT_YET
        exporting.grants.extend(Extend(7, pack_u32([1]), pack_u64([HEADER_BYTES + half])))
        ask(link, (1, HEADER_BYTES, half))
        assert answer(link) == (READ, exporting.payload[:half], READ)
        ask(link, (1, HEADER_BYTES, half + 1))
        assert answer(link)[0] == NOT_YET


def test_garbage_costs_a_real_exporter_nothing(pair: Callable[..., Pair]) -> None:
    two = pair()
    host, _, port = two.lends["endpoints"][0].removeprefix("tcp://").rpartition(":")
    pid = two.pid("exporter")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as link:
            link.sendall(os.urandom(200))
    with two.workers() as (p, d):
        chain = p.prompt(100)
        p.serve(chain)
        assert d.serve(d.agent.chain(chain.tokens)).hit.tokens == 99
    assert two.pid("exporter") == pid
    assert eventually(two.settled, 20)

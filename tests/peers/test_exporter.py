"""The exporter's end of a link, spoken to byte by byte: it gives what was lent and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import structlog
from e2e.known import eventually

from layerflow.hosts.peer import exporter
from layerflow.hosts.peer import link as link_module
from layerflow.hosts.peer.exporter import MAX_GREETING, MAX_LINKS_OF_READER, Links
from layerflow.hosts.peer.grants import Grants, RangeSeal
from layerflow.hosts.peer.link import LinkClosed, LinkFailed, LinkStalled, greeted, receive
from layerflow.hosts.peer.links.tcp import StreamLender
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Extend, Lend
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import (
    CHALLENGE,
    GONE,
    HEAD,
    HELLO,
    ITEM,
    LINK_MAGIC,
    LINK_VERSION,
    NONCE_BYTES,
    NOT_YET,
    OUTSIDE,
    PROOF,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    TAIL,
    reader_key_of,
)
from peers.conftest import Pair
from peers.relay import Relay

INCARNATION, TOKEN, READER = b"i" * 16, b"t" * 16, b"r" * 16
EXPORTER_KEY, LEASE_KEY = b"e" * 32, b"l" * 32
KEY, OFFSET, PAYLOAD = b"k" * 24, 4096, 1 << 16
OPEN_KEY, OPEN_OFFSET = b"o" * 24, 1 << 18


class Exporting:
    """Links over an arena with one whole object, and one that is being stored."""

    def __init__(self) -> None:
        self.arena = SharedMemory.create(1 << 20)
        self.withdrawn: list[int] = []
        self.grants = Grants(self.withdrawn.append, self.arena.nbytes)
        self.ended = threading.Event()
        lender, where = StreamLender(self.arena), ("127.0.0.1", 0)
        self.links = Links(
            self.arena,
            lender,
            self.grants,
            address=where,
            incarnation=INCARNATION,
            exporter_key=EXPORTER_KEY,
            ended=self.ended.set,
        )
        self.links.start()
        self.payload = os.urandom(PAYLOAD)
        header = pack_header(KEY, blocks=4, tokens=16, payload=PAYLOAD)
        self.arena.view[OFFSET : OFFSET + HEADER_BYTES + PAYLOAD] = header + self.payload
        nbytes = HEADER_BYTES + PAYLOAD
        places = pack_u64([OFFSET, OPEN_OFFSET]), pack_u64([nbytes, nbytes]), pack_u32([4, 0])
        stored = pack_u64([nbytes, HEADER_BYTES])
        self.grants.lend(Lend(7, TOKEN, pack_u32([0, 1]), KEY + OPEN_KEY, *places, stored, LEASE_KEY))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.links.port}"

    def connect(self, reader: bytes = READER) -> socket.socket:
        return greeted(self.address, reader, reader_key_of(EXPORTER_KEY, reader), time.monotonic() + 10)

    def open_links(self) -> int:
        return int(self.links.statistics()["links"])


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


def refused(link: socket.socket) -> None:
    """Nothing comes any more but the end."""
    with pytest.raises((LinkClosed, ConnectionResetError)):
        while True:
            heard(link, 1)


def test_ranges_of_what_was_lent_are_read(exporting: Exporting) -> None:
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100), (9, 0, 1), (0, HEADER_BYTES + 1000, PAYLOAD - 1000))
        heads = [HEAD.unpack(heard(link, HEAD.size)) for _ in range(3)]
        assert heads == [(0, READ, 100), (9, OUTSIDE, 0), (0, READ, PAYLOAD - 1000)]
        assert heard(link, PAYLOAD - 900) == exporting.payload[:100] + exporting.payload[1000:]
        seal, tails = RangeSeal(LEASE_KEY, TOKEN), [TAIL.unpack(heard(link, TAIL.size)) for _ in range(2)]
        assert [tail[:2] for tail in tails] == [(0, READ)] * 2
        assert seal.fits(tails[0][2], KEY, HEADER_BYTES, memoryview(exporting.payload[:100]))
        assert not seal.fits(tails[1][2], KEY, HEADER_BYTES, memoryview(exporting.payload[:100]))


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


def test_who_does_not_know_the_key_learns_nothing(exporting: Exporting) -> None:
    with pytest.raises(LinkFailed, match="another exporter answers"):
        greeted(exporting.address, READER, b"another exporter's key, 32 bytes", time.monotonic() + 10)
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        link.sendall(HELLO.pack(LINK_MAGIC, LINK_VERSION, 0, READER, bytes(NONCE_BYTES)))
        told = heard(link, CHALLENGE.size)
        assert INCARNATION not in told and EXPORTER_KEY not in told
        link.sendall(bytes(PROOF.size))
        refused(link)


def test_what_was_overheard_in_a_greeting_opens_no_link(exporting: Exporting) -> None:
    """The proofs are for nonces of both ends."""
    relay = Relay(exporting.address)
    greeted(f"127.0.0.1:{relay.port}", READER, reader_key_of(EXPORTER_KEY, READER), time.monotonic() + 10).close()
    assert eventually(lambda: len(relay.heard) == HELLO.size + PROOF.size)
    relay.close()
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        link.sendall(relay.heard)
        refused(link)


def test_strangers_keep_no_reader_out(exporting: Exporting) -> None:
    strangers = [socket.create_connection(("127.0.0.1", exporting.links.port)) for _ in range(2 * MAX_GREETING)]
    assert eventually(lambda: 0 < exporting.links.statistics()["greeting_links"] <= MAX_GREETING)
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100))
        assert answer(link) == (READ, exporting.payload[:100], READ)
        refused(strangers[0])
        for stranger in strangers:
            stranger.close()
        assert eventually(lambda: exporting.links.statistics()["greeting_links"] == 0)
        assert exporting.open_links() == 1


def test_strangers_are_bounded_where_their_threads_end_late(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = threading.Event()

    def late(*_: object) -> bytes:
        later.wait(30)
        raise LinkClosed("late")

    monkeypatch.setattr(exporter, "greet", late)
    try:
        strangers = [socket.create_connection(("127.0.0.1", exporting.links.port)) for _ in range(2 * MAX_GREETING)]
        for stranger in strangers[:MAX_GREETING]:
            refused(stranger)
        assert exporting.links.statistics()["greeting_links"] == MAX_GREETING
    finally:
        later.set()
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_greets_too_slowly_is_hung_up_on(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a health check does that only connects."""
    monkeypatch.setattr(exporter, "GREETING_S", 0.05)
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        refused(link)
    assert eventually(lambda: exporting.links.statistics()["greeting_links"] == 0)
    assert "Traceback" not in capfd.readouterr().err


def test_a_reader_that_leaks_links_loses_those_that_are_idle_longest(exporting: Exporting) -> None:
    first = exporting.connect()
    assert eventually(lambda: exporting.open_links() == 1)
    others = [exporting.connect() for _ in range(MAX_LINKS_OF_READER)]
    with exporting.connect(b"s" * 16) as another:
        assert eventually(lambda: exporting.open_links() == MAX_LINKS_OF_READER + 1)
        refused(first)
        for link in (others[-1], another):
            ask(link, (0, HEADER_BYTES, 100))
            assert answer(link)[0] == READ
    for link in (first, *others):
        link.close()


GREEDY, OTHER = b"greedy--", b"another-"
"""Two principals, as the names of their readers begin with them."""
UNKNOWN = b"u" * 16


def names(principal: bytes, links: int) -> list[bytes]:
    """The readers of so many links of one principal, as few as may have them."""
    return [principal + bytes([number // MAX_LINKS_OF_READER]) * 8 for number in range(links)]


def test_who_has_all_links_makes_room_for_another_key_though_all_of_them_are_read(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamLender, "most", 12)
    monkeypatch.setattr(exporter, "LEND_S", 600.0)
    greedy = [exporting.connect(name) for name in names(GREEDY, 12)]
    for link in greedy:
        ask(link, (0, HEADER_BYTES, 100), token=UNKNOWN)  # which may be lent yet: each request waits
    assert eventually(lambda: [link.busy for link in exporting.links._links] == [True] * 12)
    with exporting.connect(names(OTHER, 1)[0]) as other:
        ask(other, (0, HEADER_BYTES, 100))
        assert answer(other) == (READ, exporting.payload[:100], READ)
        refused(greedy[0])
        with exporting.connect(names(GREEDY, 12)[-1]) as one_more:
            refused(one_more)  # it has most, and all of its own are read
        ask(other, (0, HEADER_BYTES, 100))
        assert answer(other)[0] == READ
        nbytes = pack_u64([HEADER_BYTES + PAYLOAD])
        place = pack_u64([OFFSET]), nbytes, pack_u32([4]), nbytes
        exporting.grants.lend(Lend(8, UNKNOWN, pack_u32([0]), KEY, *place, LEASE_KEY))
        assert [answer(link)[0] for link in greedy[1:]] == [READ] * 11, "what is read is not hung up on for its own key"
    for link in greedy:
        link.close()


def test_who_has_most_links_loses_its_own_and_no_idle_one_of_another_key(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamLender, "most", 4)
    with exporting.connect(names(OTHER, 1)[0]) as other:
        assert eventually(lambda: exporting.open_links() == 1)
        greedy = list[socket.socket]()
        for open_links in (2, 3, 4):
            greedy.append(exporting.connect(names(GREEDY, 1)[0]))
            assert eventually(lambda wanted=open_links: exporting.open_links() == wanted)
        greedy.append(exporting.connect(names(GREEDY, 1)[0]))
        refused(greedy[0])
        for link in (other, *greedy[1:]):
            ask(link, (0, HEADER_BYTES, 100))
            assert answer(link)[0] == READ
    for link in greedy:
        link.close()


def test_a_link_that_asks_for_nothing_is_hung_up_on(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "IDLE_S", 0.05)
    with exporting.connect() as link:
        refused(link)
    assert eventually(lambda: exporting.open_links() == 0)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone")])
def test_an_accept_that_fails_is_tried_again(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    failures, accept = iter([error] * 3), socket.socket.accept

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener is exporting.links._listener and (failed := next(failures, None)) is not None:
            raise failed
        return accept(listener)

    monkeypatch.setattr(exporter, "PAUSE_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(3):
        with exporting.connect() as link:
            ask(link, (0, HEADER_BYTES, 100))
            assert answer(link)[0] == READ
    assert exporting.links.statistics()["failed_accepts_total"] == 3 and not exporting.ended.is_set()


def test_a_connection_without_a_thread_is_closed_and_the_next_one_is_served(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None:
            monkeypatch.undo()

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(exporter.threading, "Thread", NoThread)
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        refused(link)
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100))
        assert answer(link)[0] == READ


def test_without_its_listener_the_exporter_ends(exporting: Exporting) -> None:
    exporting.links._listener.shutdown(socket.SHUT_RDWR)
    assert exporting.ended.wait(30)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), HELLO.pack(LINK_MAGIC, 99, 0, READER, bytes(16))],
)
def test_garbage_is_hung_up_on(exporting: Exporting, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", exporting.links.port)) as link:
        link.sendall(garbage)
        refused(link)
    with exporting.connect() as link:
        link.sendall(os.urandom(REQUEST.size))
        refused(link)
    with exporting.connect() as link:
        link.sendall(REQUEST.pack(REQUEST_MAGIC, 1 << 31, TOKEN, 0))
        refused(link)
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


def test_a_reader_that_does_not_read_is_hung_up_on(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease may hold for an hour: until then each of its links would keep a thread, and the lease from ending."""
    monkeypatch.setattr(link_module, "SEND_STALL_S", 0.2)
    monkeypatch.setattr(link_module, "LEAST_BANDWIDTH", 1 << 10)  # however late its thread is, that is not too little
    with structlog.testing.capture_logs() as logged, exporting.connect() as link:
        link.settimeout(0.05)
        threads = threading.active_count()
        with contextlib.suppress(TimeoutError, ConnectionError):
            while True:  # more answers than both ends' buffers hold
                ask(link, *[(0, HEADER_BYTES, PAYLOAD)] * 16)
        assert eventually(lambda: exporting.open_links() == 0)
        assert eventually(lambda: threading.active_count() < threads)
    assert [line["error"] for line in logged] == ["nothing was taken for 0.2 s"]
    exporting.grants.withdraw(7)
    assert exporting.withdrawn == [7], "nobody reads it"


def test_who_takes_a_byte_at_a_time_does_not_hold_up_a_sender_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SEND_STALL_S", 0.0)
    monkeypatch.setattr(link_module, "LEAST_BANDWIDTH", 1 << 60)
    slow = Mock(sendmsg=lambda parts: 1)
    with pytest.raises(LinkStalled, match="bytes were not taken in the time there was"):
        link_module.send(slow, [bytes(1000)])


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


def test_a_request_waits_once_for_all_that_is_not_stored_yet(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers give up a link on which nothing comes for two waits, and with it what is stored."""
    monkeypatch.setattr(exporter, "LEND_S", link_module.STALL_S / 8)
    late = [(1, HEADER_BYTES + at, 1) for at in range(32)]
    with exporting.connect() as link:
        ask(link, (0, HEADER_BYTES, 100), *late)
        raw = bytearray(HEAD.size)
        receive(link, [memoryview(raw)], link_module.STALL_S)
        heads = [HEAD.unpack(raw)] + [HEAD.unpack(heard(link, HEAD.size)) for _ in late]
        assert heads == [(0, READ, 100)] + [(1, NOT_YET, 0)] * len(late)
        assert heard(link, 100) == exporting.payload[:100]


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
    assert eventually(two.settled)

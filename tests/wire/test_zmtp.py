"""ZMTP's parser: against arbitrary splits and bytes here, against libzmq in ``tests/server/test_door.py``."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.errors import ProtocolError
from layerflow.wire.zmtp import SMALL_BYTES, Null, Parsed, Zmtp
from wire.zmtp_client import COMMAND, LONG, MORE, frame, greeting, ready

MOST = 1 << 20


def limit(size: int) -> None:
    if size > MOST:
        raise ProtocolError(f"{size} is too much")


def parse(data: bytes, cuts: list[int], zmtp: Zmtp | None = None) -> list[bytes | None]:
    """The messages; None = one of several frames."""
    zmtp, found = zmtp or Zmtp(Null(), limit), []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        zmtp.feed(data[begin:end])
        while (message := zmtp.next()) is not Parsed.NOTHING:
            if message is not Parsed.OTHER:
                found.append(None if message is Parsed.SEVERAL else message)
    return found


class Sealing(Null):
    """A mechanism whose handshake is over, and whose seal is the content itself."""

    name, sealing = b"SEALING", True

    def __init__(self) -> None:
        self.ready = True


messages = st.lists(
    st.one_of(
        st.binary(max_size=300).map(lambda content: (frame(content), [content])),
        st.integers(0, 70_000).map(lambda size: (frame(bytes(size)), [bytes(size)])),
        st.lists(st.binary(max_size=300), min_size=2, max_size=4).map(
            lambda parts: (b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1]), [None])
        ),
        st.binary(max_size=16).map(lambda context: (frame(b"\x04PING\0\0" + context, COMMAND), [])),
    ),
    max_size=8,
)


@given(messages, st.lists(st.integers(0, 1 << 20), max_size=12))
def test_messages_are_the_same_however_their_bytes_come(sent: list[tuple[bytes, list]], cuts: list[int]) -> None:
    data = greeting() + ready() + b"".join(raw for raw, _ in sent)
    assert parse(data, cuts) == [message for _, found in sent for message in found]


@given(st.binary(max_size=400), st.lists(st.integers(0, 1 << 20), max_size=12), st.booleans())
def test_no_bytes_do_more_than_end_the_connection(noise: bytes, cuts: list[int], through: bool) -> None:
    zmtp = Zmtp(Null(), limit)
    try:
        parse((greeting() + ready() if through else b"") + noise, cuts, zmtp)
    except ProtocolError:
        return
    assert zmtp.waiting <= len(noise)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET /healthz HTTP/1.1", "not a ZMQ socket"),
        (b"\xff" + bytes(8) + b"\x7f\x02", "not a ZMQ socket"),
        (greeting(b"PLAIN"), "mechanism"),
        (greeting() + frame(b"hello"), "before the handshake"),
        (greeting() + ready(b"SUB"), "type b'SUB'"),
        (greeting() + frame(b"\x05HELLO", COMMAND), "where READY belongs"),
        (greeting() + frame(b"\x05READY\x0bSocket-Type\0\0\0\x09DEA", COMMAND), "cut off"),
        (greeting() + frame(bytes(5000), COMMAND), "a command of 5000"),
        (greeting() + ready() + frame(b"x", 8), "flags 0x8"),
        (greeting() + ready() + bytes((LONG,)) + (MOST + 1).to_bytes(8, "big"), "is too much"),
        (greeting() + ready() + frame(bytes(SMALL_BYTES - 8), MORE) * 17, "is too much"),
    ],
)
def test_what_no_client_sends_ends_its_connection(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        parse(data, [])


def test_a_message_is_judged_before_it_is_kept() -> None:
    zmtp = Zmtp(Null(), limit)
    parse(greeting() + ready() + bytes((LONG,)) + MOST.to_bytes(8, "big") + bytes(10), [], zmtp)
    assert (zmtp.waiting, zmtp.unfinished) == (19, MOST + 9)


def test_the_first_byte_behind_a_large_message_does_not_keep_it() -> None:
    zmtp, large = Zmtp(Null(), limit), frame(bytes(MOST), LONG)
    parse(greeting() + ready(), [], zmtp)
    tracemalloc.start()
    try:
        for start in range(0, len(large) + 1, 1000):
            parse((large + b"\0")[start : start + 1000], [], zmtp)
        assert zmtp.waiting == 1
        assert tracemalloc.get_traced_memory()[0] < MOST // 2
    finally:
        tracemalloc.stop()


def test_frames_of_a_message_that_does_not_end_are_not_kept() -> None:
    zmtp = Zmtp(Null(), limit)
    parse(greeting() + ready() + frame(bytes(60_000), MORE) * 10, [], zmtp)
    assert zmtp.waiting == 0
    assert zmtp.amid


def test_a_sealed_message_counts_until_its_content_is_handed_on() -> None:
    zmtp, large = Zmtp(Sealing(), limit), frame(bytes(MOST), LONG)
    zmtp.feed(greeting(b"SEALING"))
    assert zmtp.next() is Parsed.OTHER
    zmtp.feed(large)
    assert zmtp.next() is Parsed.SEALED
    assert zmtp.unfinished == zmtp.waiting == MOST
    zmtp.unseal()
    assert zmtp.unfinished == MOST, "nobody has taken it yet"
    zmtp.feed(b"\0")
    assert zmtp.next() == bytes(MOST)
    assert (zmtp.unfinished, zmtp.waiting) == (2, 1)

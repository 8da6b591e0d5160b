"""A client's end of a connection, without sockets and clocks: every order in which a server may speak."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layerflow.errors import (
    InvalidTransition,
    LayerflowError,
    ProtocolError,
    RemoteError,
    SessionUnknown,
    VersionMismatch,
)
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.client_connection import (
    CONNECTION_LIFE,
    MAX_HEARTBEAT_S,
    MIN_HEARTBEAT_S,
    MIN_LIVENESS_S,
    ClientConnection,
    ClientState,
)

HELLO = wire.Hello("engine", "control", 1)
PEER_HELLO = wire.PeerHello("reader", bytes(16), 1)
STRANGER = wire.Problem(-1, wire.STRANGER, "who is this?")
REFUSED = wire.Problem(7, "invalid", "no")
STATUS = wire.Status(1, b"{}")


def welcome(heartbeat_ms: int = 500, liveness_ms: int = 2000) -> wire.Welcome:
    return wire.Welcome(1, "0", "", bytes(16), heartbeat_ms, liveness_ms, 1000)


def peer_welcome(heartbeat_ms: int = 500, liveness_ms: int = 2000) -> wire.PeerWelcome:
    return wire.PeerWelcome("0", bytes(16), heartbeat_ms, liveness_ms, 1 << 20, [])


def greeted(hello: wire.Hello | wire.PeerHello = HELLO) -> ClientConnection:
    protocol = ClientConnection(hello)
    assert codec.decode_request(protocol.greeted(codec.greeting())) == hello
    return protocol


def welcomed(now: float = 100.0, **more: int) -> ClientConnection:
    protocol = greeted()
    protocol.receive(codec.encode(welcome(**more)), now)
    return protocol


def test_a_client_greets_says_hello_and_is_welcomed() -> None:
    protocol = ClientConnection(HELLO)
    codec.check_greeting(protocol.greeting)
    assert codec.decode_request(protocol.greeted(codec.greeting())) == HELLO
    assert protocol.state is ClientState.HELLO
    assert protocol.receive(codec.encode(welcome()), 1.0) == welcome()
    assert protocol.state is ClientState.WELCOMED
    assert protocol.receive(codec.encode(STATUS), 2.0) == STATUS


def test_a_server_that_reads_is_welcomed_as_one() -> None:
    protocol = greeted(PEER_HELLO)
    assert protocol.receive(codec.encode(peer_welcome()), 1.0) == peer_welcome()
    assert protocol.state is ClientState.WELCOMED
    assert protocol.receive(codec.encode(peer_welcome()), 2.0) == peer_welcome(), "told anew when its links change"


@pytest.mark.parametrize(
    "hello, message", [(HELLO, peer_welcome()), (PEER_HELLO, welcome()), (HELLO, STATUS), (PEER_HELLO, STATUS)]
)
def test_nothing_but_its_own_welcome_answers_a_hello(
    hello: wire.Hello | wire.PeerHello, message: wire.ToClient
) -> None:
    protocol = greeted(hello)
    with pytest.raises(ProtocolError, match="before"):
        protocol.receive(codec.encode(message), 1.0)
    assert protocol.state is ClientState.CLOSED


def test_a_refused_hello_ends_the_connection() -> None:
    protocol = greeted()
    with pytest.raises(RemoteError, match="no") as refused:
        protocol.receive(codec.encode(wire.Problem(-1, "not_allowed", "no")), 1.0)
    assert refused.value.code == "not_allowed"
    assert protocol.state is ClientState.CLOSED


def test_a_hello_of_one_that_has_not_greeted_may_be_said_anew() -> None:
    protocol = greeted()
    with pytest.raises(SessionUnknown, match="who is this"):
        protocol.receive(codec.encode(STRANGER), 1.0)
    assert protocol.state is ClientState.CLOSED


def test_another_protocol_and_no_greeting_end_the_connection() -> None:
    for frame, error in ((codec.greeting()[:-1] + b"?", VersionMismatch), (b"HTTP/1.1 400", ProtocolError)):
        protocol = ClientConnection(HELLO)
        with pytest.raises(error):
            protocol.greeted(frame)
        assert protocol.state is ClientState.CLOSED


def test_a_refused_request_is_a_message_and_a_forgotten_client_begins_anew() -> None:
    protocol = welcomed()
    assert protocol.receive(codec.encode(REFUSED), 101.0) == REFUSED
    assert protocol.state is ClientState.WELCOMED
    with pytest.raises(SessionUnknown, match="who is this"):
        protocol.receive(codec.encode(STRANGER), 102.0)
    assert protocol.state is ClientState.CLOSED


def test_a_message_larger_than_wanted_ends_the_connection() -> None:
    protocol = ClientConnection(HELLO, max_bytes=200)
    protocol.greeted(codec.greeting())
    protocol.receive(codec.encode(welcome()), 1.0)
    with pytest.raises(ProtocolError, match="limit of 200"):
        protocol.receive(codec.encode(wire.Status(1, bytes(200))), 2.0)
    assert protocol.state is ClientState.CLOSED


def test_heartbeats_begin_with_the_welcome() -> None:
    protocol = greeted()
    assert protocol.next_beat == math.inf
    protocol.receive(codec.encode(welcome(heartbeat_ms=500)), 100.0)
    assert protocol.next_beat == 100.0
    protocol.beat_sent(100.25)
    assert protocol.next_beat == 100.75
    protocol.close()
    assert protocol.next_beat == math.inf


def test_a_server_is_silent_past_its_liveness_until_something_comes() -> None:
    protocol = welcomed(100.0, liveness_ms=2000)
    assert protocol.silent_s(102.0) == 0.0
    assert protocol.silent_s(102.5) == 2.5
    protocol.received(102.5)
    assert protocol.silent_s(104.5) == 0.0
    protocol.receive(codec.encode(STATUS), 104.5)
    assert protocol.silent_s(106.5) == 0.0


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_what_a_server_tells_of_time_is_bounded(heartbeat_ms: int, liveness_ms: int) -> None:
    protocol = welcomed(0.0, heartbeat_ms=heartbeat_ms, liveness_ms=liveness_ms)
    assert MIN_HEARTBEAT_S <= protocol.heartbeat_s <= MAX_HEARTBEAT_S
    assert protocol.silent_s(MIN_LIVENESS_S) == 0.0
    assert protocol.silent_s(1e6) == 1e6


@pytest.mark.parametrize("state", [ClientState.GREETING, ClientState.CLOSED])
def test_nothing_is_received_before_the_greeting_and_after_the_end(state: ClientState) -> None:
    protocol = ClientConnection(HELLO)
    if state is ClientState.CLOSED:
        protocol.close()
    with pytest.raises(InvalidTransition, match=state.value):
        protocol.receive(codec.encode(STATUS), 1.0)


class AnyServer(RuleBasedStateMachine):
    """A server that says anything in any order, and an owner that closes whenever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol = ClientConnection(HELLO)
        self.now = self.last = 0.0
        self.state = self.protocol.state

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.state is ClientState.GREETING)
    @rule(frame=st.one_of(st.just(codec.greeting()), st.binary(max_size=30)))
    def greet(self, frame: bytes) -> None:
        try:
            codec.decode_request(self.protocol.greeted(frame))
        except LayerflowError:
            assert self.protocol.state is ClientState.CLOSED

    @rule(
        frame=st.one_of(
            st.sampled_from([welcome(), peer_welcome(), STRANGER, REFUSED, STATUS, wire.Beat(1.0)]).map(codec.encode),
            st.binary(max_size=30),
        )
    )
    def say(self, frame: bytes) -> None:
        before = self.protocol.state
        try:
            message = self.protocol.receive(frame, self.now)
        except LayerflowError:
            assert self.protocol.state is ClientState.CLOSED
        else:
            assert self.protocol.state is ClientState.WELCOMED
            assert before is ClientState.WELCOMED or message == welcome()
            self.last = self.now

    @precondition(lambda self: self.protocol.next_beat <= self.now)
    @rule()
    def beat(self) -> None:
        assert self.protocol.state is ClientState.WELCOMED
        self.protocol.beat_sent(self.now)
        assert self.protocol.next_beat == self.now + 0.5

    @rule()
    def close(self) -> None:
        self.protocol.close()

    @invariant()
    def moves_as_the_table_says(self) -> None:
        state = self.protocol.state
        assert state is self.state or CONNECTION_LIFE.leads(self.state, state)
        self.state = state

    @invariant()
    def silence_is_counted_from_the_last_message(self) -> None:
        if self.protocol.state is ClientState.WELCOMED:
            silent_s = self.now - self.last
            assert self.protocol.silent_s(self.now) == (silent_s if silent_s > 2.0 else 0.0)


TestAnyServer = AnyServer.TestCase

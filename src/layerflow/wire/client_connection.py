"""A client's end of one connection to a server, without I/O: greeting, hello, heartbeats, silence, and refusals.

Control clients, the worker's link and servers that read from other servers each have a socket and a way to wait of
their own. What they have to send and may receive, and in which order, is decided here. A connection goes like this:

1. its owner sends :data:`~ClientConnection.greeting`,
2. passes frames to :meth:`ClientConnection.greeted`, and sends what that returns, until it has said hello: a server
   that is a version behind is greeted once more, in its own,
3. passes every later frame to :meth:`ClientConnection.receive`: the first is the welcome, or a refusal,
4. where it sends heartbeats, sends one at :attr:`~ClientConnection.next_beat`, and asks
   :meth:`~ClientConnection.silent_s`.

Every error ends the connection: a client that is refused, or that the server does not know (any more), begins anew.
"""

from __future__ import annotations

import enum
import math

from layerflow.errors import InvalidTransition, LayerflowError, ProtocolError, RemoteError, SessionUnknown
from layerflow.lives import Life
from layerflow.wire import codec
from layerflow.wire.messages import STRANGER, VERSION, Hello, PeerHello, PeerWelcome, Problem, ToClient, Welcome

MAX_REPLY_BYTES = 64 << 20

MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.01, 60.0
MIN_LIVENESS_S, MAX_LIVENESS_S = 0.02, 86_400.0
"""A server may tell of its heartbeat and of its patience what its settings may be; what it tells beyond is cut off."""


class ClientState(enum.Enum):
    """Where a connection is; :data:`CONNECTION_LIFE` says what each means."""

    GREETING = "greeting"
    HELLO = "hello"
    WELCOMED = "welcomed"
    CLOSED = "closed"


CONNECTION_LIFE = Life(
    "a connection",
    {
        ClientState.GREETING: (
            "this end has greeted; the server's greeting is awaited, in a version that both speak",
            (ClientState.HELLO, ClientState.CLOSED),
        ),
        ClientState.HELLO: ("hello was said; the welcome is awaited", (ClientState.WELCOMED, ClientState.CLOSED)),
        ClientState.WELCOMED: ("the server knows this client", (ClientState.CLOSED,)),
        ClientState.CLOSED: ("nothing is sent or received any more", ()),
    },
)


class ClientConnection:
    """One connection's. All times are monotonic seconds.

    :param hello: whom this client introduces itself as.
    :param max_bytes: of one message that is received.

    :ivar version: of the protocol, in which both ends speak; known once hello is said.
    :ivar heartbeat_s: how often the server wants to hear from this client; known once welcomed.
    :ivar next_beat: when the next heartbeat is due; never before the welcome.
    """

    def __init__(self, hello: Hello | PeerHello, *, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self.state = ClientState.GREETING
        self.greeting = codec.greeting()
        self.version = codec.PROTOCOL_VERSION
        self._refusal_due = False
        self.heartbeat_s = self.next_beat = self._liveness_s = math.inf
        self._hello = hello
        self._max_bytes = max_bytes
        self._heard_at = -math.inf

    def greeted(self, frame: bytes) -> bytes:
        """Take a frame of the server's before the welcome. Return what answers it: the hello, or another greeting.

        :returns: b"" = nothing.
        :raises ProtocolError: the frame is no greeting.
        :raises VersionMismatch: the server speaks another protocol.
        """
        if self.state is not ClientState.GREETING:
            raise InvalidTransition(f"a connection that is {self.state.value} was greeted")
        if self._refusal_due and _refuses_greeting(frame):
            self._refusal_due = False
            return b""  # the first greeting's, which it does not speak
        try:
            version = codec.check_greeting(frame)
        except ProtocolError:
            self.close()
            raise
        if version < self.version:  # once, and downwards: nobody is greeted without end
            self.version, self._refusal_due = version, True
            return codec.greeting(version)
        if version > self.version:
            self.close()
            raise ProtocolError(f"the server answered a greeting in protocol {self.version} with one in {version}")
        self._enter(ClientState.HELLO)
        return codec.encode_request(self._hello)

    def receive(self, frame: bytes, now: float) -> ToClient:
        """Take a frame after the server's greeting. Return its message.

        :raises SessionUnknown: the server does not know this client (any more).
        :raises RemoteError: the hello was refused.
        :raises ProtocolError: it is no message that a server may send now.
        """
        try:
            message = codec.decode_reply(frame, self._max_bytes)
            if isinstance(message, Problem) and message.code == STRANGER:
                raise SessionUnknown(f"the server does not know this session: {message.message}")
            if self.state is not ClientState.WELCOMED:
                self._take_welcome(message, now)
        except LayerflowError:
            self.close()
            raise
        self._heard_at = now
        return message

    def received(self, now: float) -> None:
        """The server has sent something, which is not read yet."""
        self._heard_at = now

    def silent_s(self, now: float) -> float:
        """Return for how long the server has been silent, where that is longer than it may be; else 0."""
        silent_s = now - self._heard_at
        return silent_s if silent_s > self._liveness_s else 0.0

    def beat_sent(self, now: float) -> None:
        """A heartbeat is sent; the next one is due a heartbeat later."""
        self.next_beat = now + self.heartbeat_s

    def close(self) -> None:
        """The connection has ended; again = nothing."""
        if self.state is not ClientState.CLOSED:
            self._enter(ClientState.CLOSED)
            self.next_beat = math.inf

    def _take_welcome(self, message: ToClient, now: float) -> None:
        if self.state is not ClientState.HELLO:
            raise InvalidTransition(f"a connection that is {self.state.value} received {type(message).__name__}")
        if isinstance(message, Problem):
            raise RemoteError(message.code, message.message)
        expected = PeerWelcome if isinstance(self._hello, PeerHello) else Welcome
        if not isinstance(message, expected):
            raise ProtocolError(f"{type(message).__name__} before {expected.__name__}")
        self._enter(ClientState.WELCOMED)
        self.heartbeat_s = min(max(message.heartbeat_ms / 1e3, MIN_HEARTBEAT_S), MAX_HEARTBEAT_S)
        self._liveness_s = min(max(message.liveness_ms / 1e3, MIN_LIVENESS_S), MAX_LIVENESS_S)
        self.next_beat = now

    def _enter(self, state: ClientState) -> None:
        CONNECTION_LIFE.check(self.state, state, f"of {type(self._hello).__name__}")
        self.state = state


def _refuses_greeting(frame: bytes) -> bool:
    """Does a server say that it speaks another version than it was greeted in?"""
    if frame[:4] == codec.MAGIC:
        return False
    try:
        message = codec.decode_reply(frame)
    except ProtocolError:
        return False
    return isinstance(message, Problem) and message.code == VERSION

"""ZMTP 3.1 (https://rfc.zeromq.org/spec/37/), the protocol of ZMQ's sockets: a server's end, without I/O.

libzmq keeps what a client sends until its message is whole, however many frames that takes. Here a message is judged by
the headers of its frames, before their bytes are kept.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Protocol

from layerflow.errors import ProtocolError

GREETING_BYTES = 64
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
_MORE, _LONG, _COMMAND = 1, 2, 4
_LONG_HEADER = struct.Struct(">BQ")
MAX_COMMAND_BYTES = 4096
"""Largest command: of a handshake, or a heartbeat."""
UNSEALED_AT_ONCE = 128 << 10
"""Sealed messages up to this size are opened where they are parsed, in a fraction of a millisecond."""
SMALL_BYTES = 64 << 10
"""Frames up to this size are taken from everybody; larger ones have to be admitted."""

CLIENTS = (b"DEALER", b"REQ", b"ROUTER")
"""Types of sockets that may connect to a ROUTER."""

READY, ERROR, PING, PONG = b"READY", b"ERROR", b"PING", b"PONG"


class Mechanism(Protocol):
    """A server's end of a security mechanism."""

    name: bytes
    #: The handshake is over: messages may be exchanged.
    ready: bool
    #: Messages are sealed: what :meth:`open` and :meth:`seal` are for.
    sealing: bool
    #: The client's public key in Z85, where it has shown one and is admitted; else empty.
    client_key: bytes

    def command(self, name: bytes, body: bytes) -> bytes:
        """Answer a command of the handshake: the body of the server's own command.

        :raises Rejected: the client is refused, and is to be told why.
        :raises ProtocolError: this mechanism knows no such command now.
        """

    def open(self, payload: bytes) -> tuple[int, bytes]:
        """Flags (1 = more frames follow, 2 = a command) and content of a sealed message.

        :raises ProtocolError: the client has not sealed it.
        """

    def seal(self, flags: int, content: bytes) -> bytes:
        """The same for the client, sealed."""


class Rejected(ProtocolError):
    """A client that may not connect. :param answer: the body of the command that tells it."""

    def __init__(self, message: str, answer: bytes) -> None:
        super().__init__(message)
        self.answer = answer


class Parsed(enum.Enum):
    """What :meth:`Zmtp.next` found where it found no message."""

    #: Nothing more that is whole.
    NOTHING = enum.auto()
    #: Something that is no message of the client; what is behind it is still to be looked at.
    OTHER = enum.auto()
    #: A message of several frames has ended; its frames were not kept.
    SEVERAL = enum.auto()
    #: A large sealed message: :meth:`Zmtp.unseal` opens it, on any thread, before :meth:`Zmtp.next` goes on.
    SEALED = enum.auto()


class Null:
    """The mechanism NULL: clients are told apart by what the operating system knows of them."""

    name = b"NULL"
    sealing = False
    client_key = b""

    def __init__(self) -> None:
        self.ready = False

    def command(self, name: bytes, body: bytes) -> bytes:
        if name != READY:
            raise ProtocolError(f"the command {name!r} where READY belongs")
        check_client(body)
        self.ready = True
        return command(READY, metadata())

    def open(self, payload: bytes) -> tuple[int, bytes]:
        return 0, payload

    def seal(self, flags: int, content: bytes) -> bytes:
        return content


class Zmtp:
    """One connection.

    :param admit: asked before a frame of so many bytes, more than :data:`SMALL_BYTES`, is kept, and before the frames
        of one message come to so many. It raises a :class:`ProtocolError` for what is too large.

    :ivar output: bytes to be sent to the client; whoever sends them clears it.
    """

    def __init__(self, mechanism: Mechanism, admit: Callable[[int], None]) -> None:
        self._mechanism = mechanism
        self._admit = admit
        self._data: bytes | bytearray = b""
        self._at = 0  # of the first byte in _data that is not handled
        self._wanted = GREETING_BYTES  # bytes from there that are needed to go on
        self._greeted = False
        self._sealed = b""  # a message that is to be opened
        self._opened: tuple[int, bytes] | None = None  # its flags and content
        self._whole = 0  # bytes of a sealed message from when it is whole until its content is handed on
        self._several = 0  # bytes of the frames so far, where the message has several; 0 = it has not
        self.output = bytearray(
            _SIGNATURE + bytes((3, 1)) + mechanism.name.ljust(20, b"\0") + b"\x01" + bytes(31)
        )  # as-server: of no meaning to NULL

    @property
    def client_key(self) -> bytes:
        """The public key in Z85 that the client has shown and is admitted by; empty = none."""
        return self._mechanism.client_key

    @property
    def ready(self) -> bool:
        """Is the handshake over?"""
        return self._mechanism.ready

    @property
    def waiting(self) -> int:
        """Bytes that are kept until what they belong to is whole."""
        return len(self._data) - self._at + self._whole

    @property
    def unfinished(self) -> int:
        """Bytes that a half-received frame takes when it is whole, and of a sealed message that is not handed on."""
        return (self._wanted if self._at < len(self._data) else 0) + self._whole

    @property
    def amid(self) -> bool:
        """Has a message begun and not ended?"""
        return self._at < len(self._data) or self._several > 0

    @property
    def more(self) -> bool:
        """May :meth:`next` find something?"""
        return self._opened is not None or len(self._data) - self._at >= self._wanted

    def feed(self, data: bytes) -> None:
        """Take bytes that the client has sent."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        if self._at or not isinstance(self._data, bytearray):
            self._data, self._at = bytearray(memoryview(self._data)[self._at :]), 0
        self._data += data

    def next(self) -> bytes | Parsed:
        """The client's next message, of one frame.

        :raises ProtocolError: this client does not speak ZMTP 3, or sends what is too large. Nothing more can be made
            of what it sends.
        """
        data, at = self._data, self._at
        have = len(data) - at
        if not self._greeted and have:
            return self._greet(data, have)
        if self._opened is not None:
            (flags, body), self._opened = self._opened, None
            self._whole = 0
            return self._told(flags, body)
        if have < self._wanted:
            return Parsed.NOTHING
        flags, size, start = data[at], data[at + 1], at + 2
        if flags & _LONG:
            start = at + 9
            if have < 9:
                self._wanted = 9
                return Parsed.NOTHING
            size = int.from_bytes(data[at + 1 : start], "big")
        if flags & ~_MORE or size > SMALL_BYTES or not self._mechanism.ready:
            self._judge(flags, size)
        end = start + size
        if end - at > have:
            self._wanted = end - at
            return Parsed.NOTHING
        body = data[start:end] if isinstance(data, bytes) else bytes(memoryview(data)[start:end])
        self._at, self._wanted = end, 2
        if end == len(data):
            self._data, self._at = b"", 0
        elif size > SMALL_BYTES:  # what is behind it keeps no large message in memory
            self._data, self._at = bytes(memoryview(data)[end:]), 0
        if not (self._mechanism.sealing and self._mechanism.ready):
            return self._told(flags, body)
        self._sealed, self._whole = body, size
        if size > UNSEALED_AT_ONCE:
            return Parsed.SEALED
        self.unseal()
        return self.next()

    def unseal(self) -> None:
        """Open the sealed message that :meth:`next` has found; no other method is called meanwhile.

        :raises ProtocolError: the client has not sealed it.
        """
        sealed, self._sealed = self._sealed, b""
        inner, content = self._mechanism.open(sealed)
        self._opened = (inner & 1) | (_COMMAND if inner & 2 else 0), content

    def _told(self, flags: int, body: bytes) -> bytes | Parsed:
        """A whole frame."""
        if flags & _COMMAND:
            self._obey(body)
            return Parsed.OTHER
        if not flags & _MORE and not self._several:
            return body
        self._several += 2 + len(body)
        if self._several > SMALL_BYTES:
            self._admit(self._several)
        if flags & _MORE:
            return Parsed.OTHER
        self._several = 0
        return Parsed.SEVERAL

    def frame(self, content: bytes) -> bytes:
        """A message of one frame, as bytes to be sent."""
        if self._mechanism.sealing:
            content = self._mechanism.seal(0, content)
        return _framed(0, content)

    def _greet(self, data: bytes | bytearray, have: int) -> Parsed:
        at = self._at
        if data[at] != 0xFF or (have > 9 and not data[at + 9] & 1) or (have > 10 and data[at + 10] < 3):
            raise ProtocolError("not a ZMQ socket of ZMTP 3")
        if have < GREETING_BYTES:
            return Parsed.NOTHING
        name = bytes(data[at + 12 : at + 32]).rstrip(b"\0")
        if name != self._mechanism.name:
            raise ProtocolError(f"the client's mechanism is {name!r}; this socket's is {self._mechanism.name!r}")
        self._greeted = True
        self._at, self._wanted = at + GREETING_BYTES, 2
        return Parsed.OTHER

    def _judge(self, flags: int, size: int) -> None:
        """A frame that is more than a small message.

        :raises ProtocolError: it may not come now, or not be so large.
        """
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"a frame with flags {flags:#x}, which ZMTP 3 does not have")
        if flags & _COMMAND and size > MAX_COMMAND_BYTES:
            raise ProtocolError(f"a command of {size} bytes; {MAX_COMMAND_BYTES} are enough for every one")
        if not self._mechanism.ready and not flags & _COMMAND:
            raise ProtocolError("a message before the handshake is over")
        if size > SMALL_BYTES:
            self._admit(size + self._several)

    def _obey(self, body: bytes) -> None:
        name, rest = _command_of(body)
        if not self._mechanism.ready:
            try:
                self.output += _framed(_COMMAND, self._mechanism.command(name, rest))
            except Rejected as error:
                self.output += _framed(_COMMAND, error.answer)
                raise
        elif name == PING and len(rest) >= 2:
            pong = command(PONG, rest[2:18])
            sealing = self._mechanism.sealing
            self.output += _framed(0, self._mechanism.seal(2, pong)) if sealing else _framed(_COMMAND, pong)
        elif name == ERROR:
            raise ProtocolError(f"the client says ERROR {rest[1:256]!r}")


def command(name: bytes, body: bytes) -> bytes:
    """The body of a command."""
    return bytes((len(name),)) + name + body


def metadata() -> bytes:
    """What the server tells of its socket in a handshake."""
    return b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", b"ROUTER"), (b"Identity", b""))
    )


def check_client(told: bytes) -> None:
    """What a client tells of its socket in a handshake.

    :raises ProtocolError: it is malformed, or the socket is of a type that a ROUTER does not talk to.
    """
    at, kind = 0, b""
    while at < len(told):
        value_at = at + 1 + told[at] + 4
        name = told[at + 1 : value_at - 4]
        end = value_at + int.from_bytes(told[value_at - 4 : value_at], "big")
        if not name or end > len(told):
            raise ProtocolError("a handshake whose properties are cut off")
        if name.lower() == b"socket-type":
            kind = told[value_at:end]
        at = end
    if kind not in CLIENTS:
        raise ProtocolError(f"a socket of type {kind[:16]!r}; connect a DEALER")


def _command_of(body: bytes) -> tuple[bytes, bytes]:
    """Name and content."""
    if not body or len(body) < 1 + body[0]:
        raise ProtocolError("a command without a name")
    return body[1 : 1 + body[0]], body[1 + body[0] :]


def _framed(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return _LONG_HEADER.pack(flags | _LONG, len(body)) + body

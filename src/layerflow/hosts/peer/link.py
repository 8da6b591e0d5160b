"""The contract of a link: what an importer and an exporter do over it.

Whatever moves the bytes, an importer connects to its exporter over TCP first: there both greet each other, requests
show the token of their lease, and the exporter says of each object whether its bytes count, with a tag that covers
them.
"""

from __future__ import annotations

import abc
import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.peer.grants import ReadGrant
from layerflow.wire.peer_link import (
    ALTERED,
    CHALLENGE,
    GONE,
    HELLO,
    LINK_MAGIC,
    LINK_VERSION,
    NONCE_BYTES,
    PROOF,
    READ,
    STATUS_WORDS,
    Origin,
    check_version,
    reader_key_of,
)

STALL_S = 2.0
"""Of a link on which nothing comes for so long nothing more is expected, in seconds."""
Items = Sequence[tuple[int, int, int]]
"""Position in the lease, first byte within the object, bytes."""
_OUTCOMES = {GONE: ObjectStatus.EXPIRED, ALTERED: ObjectStatus.BROKEN}


class LinkFailed(Exception):
    """Nothing more comes over this link, and nothing that it was asked for will be written any more."""


class PeerLink(abc.ABC):
    """The importer's end, connected to one exporter. For one thread."""

    @abc.abstractmethod
    def read(
        self, origin: Origin, places: Sequence[ObjectLocation], lo: int, hi: int, until: float
    ) -> list[ObjectResult]:
        """Layers `lo` to `hi` of these, into the reader's arena.

        :raises LinkFailed: none of it counts.
        """

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Has the other end hung up while nothing was asked for?"""

    @abc.abstractmethod
    def close(self) -> None:
        """Hang up."""


class LentLink(abc.ABC):
    """The exporter's end of one connection. For one thread."""

    def introduce(self, connection: socket.socket) -> None:  # noqa: B027 - most have nothing to say
        """After the greeting: what the reader has to know of the data plane."""

    @abc.abstractmethod
    def send(self, connection: socket.socket, grant: ReadGrant, heads: Sequence[bytes], items: Items, turn: int) -> int:
        """Answer a request of which something may be read.

        :param heads: of all that was asked for. :param items: of that, what may be read.
        :returns: bytes that were given.
        """

    def close(self) -> None:  # noqa: B027 - nor to give back
        """The connection has ended."""


MAX_LINKS = 256
"""Connections to one exporter at once."""


class Lender(abc.ABC):
    """The exporter's end of a kind of link, for all connections.

    :cvar most: of them at once.
    """

    most = MAX_LINKS

    @abc.abstractmethod
    def open(self, incarnation: bytes) -> LentLink:
        """For a new connection; any thread.

        :param incarnation: of this exporter.
        :raises LinkFailed: there is no room for more.
        """


def result_of(place: ObjectLocation, status: int) -> ObjectResult:
    """What a status of :mod:`layerflow.wire.peer_link` says of an object."""
    if status == READ:
        return OK
    why = STATUS_WORDS.get(status, f"status {status}")
    return ObjectResult(_OUTCOMES.get(status, ObjectStatus.FAILED), f"object {place.key.hex()[:8]}: {why}")


# Whole frames over blocking sockets.


_TIMEVAL = struct.Struct("@ll")


class LinkClosed(Exception):
    """The connection has ended, or is to."""


class LinkStalled(Exception):
    """Nothing came, or was taken, for too long."""


SEND_STALL_S = 5.0
"""How long the other end may take nothing of what is sent."""
LEAST_BANDWIDTH = 1 << 20
"""Bytes per second of a link that is any good: who takes a few at a time keeps no thread."""
MAX_BUFFERS = 1024
"""That one call of the kernel fills (IOV_MAX)."""


def set_timeout(connection: socket.socket, seconds: float | None) -> None:
    """How long one receive may wait."""
    _limit(connection, socket.SO_RCVTIMEO, 0.0 if seconds is None else max(seconds, 1e-3))


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    """By the kernel: a socket of Python's with a time-out polls before each call. 0 = without a limit."""
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def hung_up(connection: socket.socket) -> bool:
    """Has the other end hung up, or said what nobody has asked for? Neither leaves a connection to go on with."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def receive(
    connection: socket.socket, room: Sequence[memoryview], stall_s: float | None, until: float | None = None
) -> None:
    """Fill all of `room`, one after the other.

    :param stall_s: how long nothing may come. :param until: when it must have come, on the monotonic clock.
    :raises LinkClosed: the other end has hung up.
    :raises LinkStalled: too slow.
    :raises OSError: the connection is broken.
    """
    set_timeout(connection, stall_s)
    left = deque(part for part in room if part.nbytes)
    while left:
        try:
            got = connection.recvmsg_into(list(islice(left, MAX_BUFFERS)), 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise LinkStalled(f"nothing came for {stall_s:g} s") from None
        if not got:
            raise LinkClosed("the other end has hung up")
        while left and got >= left[0].nbytes:
            got -= left.popleft().nbytes
        if got:
            left[0] = left[0][got:]
        if left and until is not None and time.monotonic() >= until:
            raise LinkStalled(f"{sum(part.nbytes for part in left)} bytes have not come in the time there was")


def send(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """All of it, in one call where the kernel takes it.

    :raises LinkClosed: the other end has hung up.
    :raises LinkStalled: it takes nothing, or too little.
    """
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    until = time.monotonic() + SEND_STALL_S + sum(part.nbytes for part in left) / LEAST_BANDWIDTH
    _limit(connection, socket.SO_SNDTIMEO, SEND_STALL_S)
    try:
        while left:
            sent = connection.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]
            if left and time.monotonic() >= until:
                raise LinkStalled(f"{sum(part.nbytes for part in left)} bytes were not taken in the time there was")
    except BlockingIOError:
        raise LinkStalled(f"nothing was taken for {SEND_STALL_S:g} s") from None
    except (BrokenPipeError, ConnectionResetError):
        raise LinkClosed("the other end has hung up") from None


# The greeting on a link, both ends: each shows that it knows the reader's key, and nothing that helps who does not.


CONNECT_S = 2.0
_EXPORTER, _IMPORTER = b"exporter", b"importer"


def greeted(address: str, reader: bytes, reader_key: bytes, until: float) -> socket.socket:
    """A connection to the exporter that this reader was told of.

    :param address: ``host:port``.
    :param until: when it must be there, on the monotonic clock.
    :raises LinkFailed: nobody answers there, or another exporter does.
    """
    host, _, port = address.rpartition(":")
    left = min(CONNECT_S, until - time.monotonic())
    if left <= 0:
        raise LinkFailed("no time is left to connect")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
    except OSError as error:
        raise LinkFailed(f"cannot connect: {error.strerror or error}") from None
    try:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(NONCE_BYTES)
        send(connection, [HELLO.pack(LINK_MAGIC, LINK_VERSION, 0, reader, mine)])
        raw = bytearray(CHALLENGE.size)
        receive(connection, [memoryview(raw)], STALL_S, until)
        magic, version, _, theirs, proof = CHALLENGE.unpack(raw)
        check_version(magic, version)
        if not hmac.compare_digest(proof, _proof(reader_key, _EXPORTER, reader, mine, theirs)):
            raise LinkFailed("another exporter answers: the peer has restarted, or somebody else listens there")
        send(connection, [PROOF.pack(_proof(reader_key, _IMPORTER, reader, mine, theirs))])
    except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
        _hang_up(connection)
        raise LinkFailed(str(error)) from None
    except LinkFailed:
        _hang_up(connection)
        raise
    return connection


def greet(connection: socket.socket, exporter_key: bytes, within_s: float) -> bytes:
    """The exporter's end: the name of the reader that has connected.

    :param within_s: the whole greeting must be over by then.
    :raises LinkStalled: it takes too long.
    :raises LinkClosed: the other end has hung up.
    :raises ProtocolError: it is no reader of this exporter.
    """
    until = time.monotonic() + within_s
    raw = bytearray(HELLO.size)
    receive(connection, [memoryview(raw)], within_s, until)
    magic, version, _, reader, theirs = HELLO.unpack(raw)
    check_version(magic, version)
    mine, key = secrets.token_bytes(NONCE_BYTES), reader_key_of(exporter_key, reader)
    send(connection, [CHALLENGE.pack(LINK_MAGIC, LINK_VERSION, 0, mine, _proof(key, _EXPORTER, reader, theirs, mine))])
    proof = bytearray(PROOF.size)
    receive(connection, [memoryview(proof)], max(1e-3, until - time.monotonic()), until)
    if not hmac.compare_digest(bytes(proof), _proof(key, _IMPORTER, reader, theirs, mine)):
        raise ProtocolError("no reader of this exporter: it does not know the key that came with PeerWelcome")
    return bytes(reader)


def _proof(key: bytes, end: bytes, reader: bytes, importers: bytes, exporters: bytes) -> bytes:
    return hmac.digest(key, end + reader + importers + exporters, "sha256")


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()

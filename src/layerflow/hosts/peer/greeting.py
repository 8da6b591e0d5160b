"""The greeting on a link, both ends: each shows that it knows the reader's key, and nothing that helps who does not."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time

from layerflow.errors import ProtocolError
from layerflow.hosts.peer.link import STALL_S, LinkFailed
from layerflow.hosts.peer.streams import LinkClosed, LinkStalled, receive, send
from layerflow.wire.peer_link import (
    CHALLENGE,
    HELLO,
    LINK_MAGIC,
    LINK_VERSION,
    NONCE_BYTES,
    PROOF,
    check_version,
    reader_key_of,
)

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

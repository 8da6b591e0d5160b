"""How an importer reaches an exporter, whatever the link: a TCP connection, and a greeting by incarnation."""

from __future__ import annotations

import contextlib
import socket
import time

from layerflow.errors import ProtocolError
from layerflow.hosts.peer.link import STALL_S, LinkFailed
from layerflow.hosts.peer.streams import LinkClosed, LinkStalled, receive, send
from layerflow.wire.peer_link import HELLO, Origin, check_hello, hello

CONNECT_S = 2.0


def greeted(origin: Origin, until: float) -> socket.socket:
    """A connection to the exporter that `origin` names.

    :param until: when it must be there, on the monotonic clock.
    :raises LinkFailed: nobody answers there, or another exporter does.
    """
    host, _, port = origin.address.rpartition(":")
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
        send(connection, [hello(origin.incarnation)])
        raw = bytearray(HELLO.size)
        receive(connection, [memoryview(raw)], STALL_S, until)
        if check_hello(bytes(raw)) != origin.incarnation:
            raise LinkFailed("another exporter answers: the peer has restarted")
    except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
        _hang_up(connection)
        raise LinkFailed(str(error)) from None
    except LinkFailed:
        _hang_up(connection)
        raise
    return connection


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()

"""The link of our own: one TCP connection to an exporter; bytes are received where they belong in the arena."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.peer.streams import LinkClosed, LinkStalled, receive, send
from layerflow.wire.peer_link import (
    GONE,
    HEAD,
    HELLO,
    ITEM,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    STATUS_WORDS,
    TAIL,
    Origin,
    check_hello,
    hello,
)

CONNECT_S = 2.0
STALL_S = 2.0
"""Of a link on which nothing comes for so long nothing more is expected, in seconds."""
_OUTCOMES = {GONE: ObjectStatus.EXPIRED}


class LinkFailed(Exception):
    """Nothing more comes over this link."""


class TcpLink:
    """Connected, greeted.

    :param view: the reader's arena.
    :param until: when it must be, on the monotonic clock.
    :raises LinkFailed: nobody answers there, or another exporter does.
    """

    def __init__(self, view: memoryview, origin: Origin, until: float) -> None:
        self._view = view
        host, _, port = origin.address.rpartition(":")
        left = min(CONNECT_S, until - time.monotonic())
        if left <= 0:
            raise LinkFailed("no time is left to connect")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
        except OSError as error:
            raise LinkFailed(f"cannot connect: {error.strerror or error}") from None
        try:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(self._socket, [hello(origin.incarnation)])
            raw = bytearray(HELLO.size)
            receive(self._socket, memoryview(raw), STALL_S, until)
            if check_hello(bytes(raw)) != origin.incarnation:
                raise LinkFailed("another exporter answers: the peer has restarted")
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            self.close()
            raise LinkFailed(str(error)) from None
        except LinkFailed:
            self.close()
            raise

    def read(
        self, origin: Origin, places: Sequence[ObjectLocation], lo: int, hi: int, until: float
    ) -> list[ObjectResult]:
        """Layers `lo` to `hi` of these.

        :raises LinkFailed: none of it counts.
        """
        spans = [(place.start(lo), (hi - lo) * place.layer_bytes) for place in places]
        table = b"".join(ITEM.pack(place.position, 0, *span) for place, span in zip(places, spans, strict=True))
        try:
            send(self._socket, [REQUEST.pack(REQUEST_MAGIC, len(places), origin.token, 0), table])
            return [self._item(place, *span, until) for place, span in zip(places, spans, strict=True)]
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            raise LinkFailed(str(error)) from None

    def _item(self, place: ObjectLocation, start: int, length: int, until: float) -> ObjectResult:
        head = bytearray(HEAD.size)
        receive(self._socket, memoryview(head), STALL_S, until)
        position, status, coming = HEAD.unpack(head)
        if position != place.position or coming != (length if status == READ else 0):
            raise ProtocolError(f"object {position} and {coming} bytes came, asked was {place.position} and {length}")
        if status == READ:
            at = place.offset + start
            receive(self._socket, self._view[at : at + length], STALL_S, until)
            tail = bytearray(TAIL.size)
            receive(self._socket, memoryview(tail), STALL_S, until)
            position, status = TAIL.unpack(tail)
            if position != place.position:
                raise ProtocolError(f"the tail of object {position} came, not that of {place.position}")
        if status == READ:
            return OK
        why = STATUS_WORDS.get(status, f"status {status}")
        return ObjectResult(_OUTCOMES.get(status, ObjectStatus.FAILED), f"peer {origin_name(place)}: {why}")

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()


def origin_name(place: ObjectLocation) -> str:
    """For messages."""
    return f"object {place.key.hex()[:8]}"

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
            receive(self._socket, [memoryview(raw)], STALL_S, until)
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
            return self._answers(places, spans, until)
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            raise LinkFailed(str(error)) from None

    def _answers(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        heads = bytearray(HEAD.size * len(places))
        receive(self._socket, [memoryview(heads)], STALL_S, until)
        states, coming = [], []
        for place, (start, length), (position, status, nbytes) in zip(
            places, spans, HEAD.iter_unpack(heads), strict=True
        ):
            if position != place.position or nbytes != (length if status == READ else 0):
                raise ProtocolError(f"object {position}, {nbytes} bytes; asked were {place.position} and {length}")
            states.append(status)
            if status == READ:
                coming.append(self._view[place.offset + start : place.offset + start + length])
        receive(self._socket, coming, STALL_S, until)
        tails = bytearray(TAIL.size * len(coming))
        receive(self._socket, [memoryview(tails)], STALL_S, until)
        ends = iter(TAIL.iter_unpack(tails))
        results = []
        for place, status in zip(places, states, strict=True):
            end = next(ends) if status == READ else (place.position, status)
            if end[0] != place.position:
                raise ProtocolError(f"the tail of object {end[0]} came, not that of {place.position}")
            results.append(_result(place, end[1]))
        return results

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _result(place: ObjectLocation, status: int) -> ObjectResult:
    if status == READ:
        return OK
    why = STATUS_WORDS.get(status, f"status {status}")
    return ObjectResult(_OUTCOMES.get(status, ObjectStatus.FAILED), f"object {place.key.hex()[:8]}: {why}")

"""The link of our own: bytes come over the connection itself, sent out of one arena and received into the other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import ObjectLocation, ObjectResult
from layerflow.hosts.peer.grants import RangeSeal, ReadGrant
from layerflow.hosts.peer.link import (
    STALL_S,
    Items,
    Lender,
    LentLink,
    LinkClosed,
    LinkFailed,
    LinkStalled,
    PeerLink,
    greeted,
    hung_up,
    receive,
    result_of,
    send,
)
from layerflow.links import LinkPlugin
from layerflow.system.memfd import SharedMemory
from layerflow.wire.peer_link import ALTERED, HEAD, ITEM, READ, REQUEST, REQUEST_MAGIC, TAIL, Origin

LINK = LinkPlugin(reader=f"{__name__}:reader", lender=f"{__name__}:lender")
PIECE_BYTES = 1 << 20
"""Sent in one call: between two of them a withdrawn lease is seen."""
MAX_PIECES = 256
"""Of one such call, where they are small."""


def reader(arena: SharedMemory, origin: Origin, until: float) -> PeerLink:
    """:raises LinkFailed: nobody answers there, or another exporter does."""
    return TcpLink(arena.view, origin, until)


def lender(arena: SharedMemory, _host: str) -> Lender:
    """Serves out of the arena."""
    return StreamLender(arena)


class TcpLink(PeerLink):
    """Connected, greeted.

    :param view: the reader's arena.
    :param until: when it must be, on the monotonic clock.
    :raises LinkFailed: nobody answers there, or another exporter does.
    """

    def __init__(self, view: memoryview, origin: Origin, until: float) -> None:
        self._view = view
        self._socket = greeted(origin.address, origin.reader, origin.reader_key, until)

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
            return self._answers(RangeSeal(origin.lease_key, origin.token), places, spans, until)
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            raise LinkFailed(str(error)) from None

    def _answers(
        self, seal: RangeSeal, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
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
        ends = iter(zip(coming, TAIL.iter_unpack(tails), strict=True))
        results = []
        for place, (start, _), status in zip(places, spans, states, strict=True):
            end = status
            if status == READ:
                data, (position, end, tag) = next(ends)
                if position != place.position:
                    raise ProtocolError(f"the tail of object {position} came, not that of {place.position}")
                if end == READ and not seal.fits(tag, place.key, start, data):
                    end = ALTERED
            results.append(result_of(place, end))
        return results

    @property
    def closed(self) -> bool:
        return hung_up(self._socket)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()


class StreamLender(Lender):
    """Sends out of the arena, which is mapped here for reading."""

    def __init__(self, arena: SharedMemory) -> None:
        self._stream = _Stream(arena)

    def open(self, incarnation: bytes) -> LentLink:
        return self._stream


class _Stream(LentLink):
    """Has no state of a connection: one serves all."""

    def __init__(self, arena: SharedMemory) -> None:
        self._arena = arena

    def send(self, connection: socket.socket, grant: ReadGrant, heads: Sequence[bytes], items: Items, turn: int) -> int:
        view, pieces, nbytes = self._arena.view, [memoryview(b"".join(heads))], 0
        tags = []
        for item in items:
            position, start, length = item
            at = grant.objects[position].offset + start
            # Ahead of its bytes, so that the reader, which waits for the tails, has them as soon as the last byte.
            tags.append(grant.tag(item, view[at : at + length]))
            for piece in range(at, at + length, PIECE_BYTES):
                pieces.append(view[piece : min(piece + PIECE_BYTES, at + length)])
                nbytes += pieces[-1].nbytes
                if nbytes >= PIECE_BYTES or len(pieces) == MAX_PIECES:
                    send(connection, pieces)
                    pieces, nbytes = [], 0
                    if grant.withdrawn:
                        raise LinkClosed("its lease was withdrawn")
        send(connection, pieces)
        tails = [grant.tail(self._arena.read, item, tag) for item, tag in zip(items, tags, strict=True)]
        send(connection, [b"".join(tails)])
        return sum(length for _, _, length in items)

"""The exporter's end of links: connections of readers, one thread each, served out of the arena."""

from __future__ import annotations

import contextlib
import socket
import threading

import structlog

from layerflow.errors import ProtocolError
from layerflow.hosts.peer.grants import Grant, Grants
from layerflow.hosts.peer.streams import LinkClosed, receive, send
from layerflow.wire.peer_link import (
    GONE,
    HEAD,
    HELLO,
    ITEM,
    MAX_LINK_ITEMS,
    NOT_YET,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    TAIL,
    check_hello,
    hello,
)

MAX_LINKS = 256
"""Connections at once; one more is hung up on."""
HELLO_S = 5.0
PIECE_BYTES = 1 << 20
"""Sent in one call: between two of them a withdrawn lease is seen."""
BACKLOG = 64

log = structlog.get_logger("layerflow.hosts.peer.serving")


class Links:
    """Listens, and serves.

    :param view: the arena.
    :param address: host and port, 0 = any.
    :param incarnation: of this exporter.
    :raises OSError: nobody can listen there.
    """

    def __init__(self, view: memoryview, grants: Grants, address: tuple[str, int], incarnation: bytes) -> None:
        self._view, self._grants, self._incarnation = view, grants, incarnation
        self._listener = socket.create_server(address, backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._read_bytes = self._read_objects = self._refused = 0

    def start(self) -> None:
        """Accept, on a thread."""
        threading.Thread(target=self._accept, name="layerflow-accept", daemon=True).start()

    def statistics(self) -> dict[str, float]:
        """Counters and gauges."""
        with self._lock:
            return {
                "links": len(self._open),
                "lent_leases": len(self._grants),
                "read_bytes_total": self._read_bytes,
                "read_objects_total": self._read_objects,
                "refused_links_total": self._refused,
            }

    def _accept(self) -> None:
        while True:
            connection, address = self._listener.accept()
            with self._lock:
                full = len(self._open) >= MAX_LINKS
                if not full:
                    self._open.add(connection)
            if full:
                self._refuse(f"{address[0]}:{address[1]}", f"{MAX_LINKS} links are open")
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection, f"{address[0]}:{address[1]}"), name="layerflow-link", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, reader: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._greet(connection)
            while True:
                self._answer(connection)
        except LinkClosed:
            pass
        except (ProtocolError, OSError) as error:
            self._refuse(reader, str(error))
        finally:
            with self._lock:
                self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.close()

    def _refuse(self, reader: str, why: str) -> None:
        with self._lock:
            self._refused += 1
        log.warning("link_refused", reader=reader, error=why)

    def _greet(self, connection: socket.socket) -> None:
        raw = bytearray(HELLO.size)
        receive(connection, memoryview(raw), HELLO_S)
        wanted = check_hello(bytes(raw))
        send(connection, [hello(self._incarnation)])
        if wanted != self._incarnation:
            raise LinkClosed("it looks for an exporter that is gone")

    def _answer(self, connection: socket.socket) -> None:
        """One request."""
        raw = bytearray(REQUEST.size)
        receive(connection, memoryview(raw), None)
        magic, count, token, _ = REQUEST.unpack(raw)
        if magic != REQUEST_MAGIC or not 0 < count <= MAX_LINK_ITEMS:
            raise ProtocolError(f"no request: {magic!r} with {count} items")
        table = bytearray(count * ITEM.size)
        receive(connection, memoryview(table), HELLO_S)
        with self._grants.read(token, connection) as grant:
            trailer = b""
            for position, _, start, length in ITEM.iter_unpack(table):
                trailer = self._send_item(connection, grant, trailer, (position, start, length))
            send(connection, [trailer])

    def _send_item(
        self, connection: socket.socket, grant: Grant | None, trailer: bytes, item: tuple[int, int, int]
    ) -> bytes:
        """Send the tail of the item before and this one; its own tail, to be sent before the next."""
        position, start, length = item
        status = GONE if grant is None else grant.check(self._view, position, start, length)
        if grant is not None and status == NOT_YET:
            self._grants.wait(grant, position, start + length)
            status = grant.check(self._view, position, start, length)
        if grant is None or status != READ:
            send(connection, [trailer, HEAD.pack(position, status, 0)])
            return b""
        at = grant.offsets[position] + start
        front = trailer + HEAD.pack(position, READ, length)
        for piece in range(at, at + length, PIECE_BYTES):
            send(connection, [front, self._view[piece : min(piece + PIECE_BYTES, at + length)]])
            front = b""
            if grant.withdrawn:
                raise LinkClosed("its lease was withdrawn")
        # The kernel has copied the bytes: if they may be read now, they were the object's all the while.
        status = grant.check(self._view, position, start, length)
        with self._lock:
            self._read_bytes += length
            self._read_objects += 1
        return TAIL.pack(position, status)

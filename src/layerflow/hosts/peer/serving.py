"""The exporter's end of links: connections of readers, one thread each; what the bytes go over is the lender's."""

from __future__ import annotations

import contextlib
import socket
import threading

import structlog

from layerflow.errors import ProtocolError
from layerflow.hosts.peer.grants import Grants, ReadGrant
from layerflow.hosts.peer.link import Lender, LentLink, LinkFailed
from layerflow.hosts.peer.streams import LinkClosed, receive, send
from layerflow.system.memfd import SharedMemory
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
    check_hello,
    hello,
)

MAX_LINKS = 256
"""Connections at once; one more is hung up on."""
HELLO_S = 5.0
BACKLOG = 64

log = structlog.get_logger("layerflow.hosts.peer.serving")


class Links:
    """Listens, and serves.

    :param arena: what grants say of it is read here. :param lender: moves bytes out of it.
    :param address: host and port, 0 = any.
    :param incarnation: of this exporter.
    :raises OSError: nobody can listen there.
    """

    def __init__(
        self, arena: SharedMemory, lender: Lender, grants: Grants, address: tuple[str, int], incarnation: bytes
    ) -> None:
        self._arena, self._lender, self._grants, self._incarnation = arena, lender, grants, incarnation
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
            with contextlib.closing(self._lender.open(self._incarnation)) as lent:
                lent.introduce(connection)
                while True:
                    self._answer(connection, lent)
        except LinkClosed:
            pass
        except (ProtocolError, LinkFailed, OSError) as error:
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
        receive(connection, [memoryview(raw)], HELLO_S)
        wanted = check_hello(bytes(raw))
        send(connection, [hello(self._incarnation)])
        if wanted != self._incarnation:
            raise LinkClosed("it looks for an exporter that is gone")

    def _answer(self, connection: socket.socket, lent: LentLink) -> None:
        """One request."""
        raw = bytearray(REQUEST.size)
        receive(connection, [memoryview(raw)], None)
        magic, count, token, turn = REQUEST.unpack(raw)
        if magic != REQUEST_MAGIC or not 0 < count <= MAX_LINK_ITEMS:
            raise ProtocolError(f"no request: {magic!r} with {count} items")
        table = bytearray(count * ITEM.size)
        receive(connection, [memoryview(table)], HELLO_S)
        items = [(position, start, length) for position, _, start, length in ITEM.iter_unpack(table)]
        with self._grants.read(token, connection) as grant:
            states = [self._state(grant, *item) for item in items]
            heads = [
                HEAD.pack(position, status, length if status == READ else 0)
                for (position, _, length), status in zip(items, states, strict=True)
            ]
            mine = [item for item, status in zip(items, states, strict=True) if status == READ]
            if grant is None or not mine:
                send(connection, [b"".join(heads)])
                return
            given = lent.send(connection, grant, heads, mine, turn)
        with self._lock:
            self._read_bytes += given
            self._read_objects += len(mine)

    def _state(self, grant: ReadGrant | None, position: int, start: int, length: int) -> int:
        """Whether it may be read; a status."""
        if grant is None:
            return GONE
        status = grant.check(self._arena.read, position, start, length)
        if status == NOT_YET:
            self._grants.wait(grant, position, start + length)
            status = grant.check(self._arena.read, position, start, length)
        return status

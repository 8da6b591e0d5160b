"""``python -m layerflow.hosts.peer.exporter``: lets other servers read what its own server lends them of the arena.

Started by a server, never by hand. It writes nothing: its mapping of the arena, where it has one, is for reading.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from layerflow.backends import named
from layerflow.errors import LayerflowError, ProtocolError
from layerflow.expiring import ExpiringSet
from layerflow.hosts.arguments import connect
from layerflow.hosts.backend import Unusable
from layerflow.hosts.peer.grants import LEND_S, Grants, ReadGrant
from layerflow.hosts.peer.link import Lender, LentLink, LinkClosed, LinkFailed, LinkStalled, greet, receive, send
from layerflow.links import links
from layerflow.system.descriptors import prepare_descriptors
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.host_messages import (
    Down,
    Extend,
    Frames,
    Lend,
    Ping,
    Pong,
    Start,
    Stop,
    ToServer,
    Up,
    Withdraw,
    Withdrawn,
    decode_to_host,
    encode,
)
from layerflow.wire.peer_link import (
    GONE,
    HEAD,
    ITEM,
    MAX_LINK_ITEMS,
    NOT_YET,
    PRINCIPAL_BYTES,
    READ,
    REQUEST,
    REQUEST_MAGIC,
)

# The exporter's end of links: connections of readers, one thread each; what the bytes go over is the lender's.
#
# A connection counts among the links once it has shown that it is a reader's. Until then it has a few seconds, and it
# is hung up on where too many others come after it: whoever can reach the port keeps no reader out. Nor does a reader,
# or a key with many: where all links are taken, whoever has most makes room for who has fewer.


MAX_LINKS_OF_READER = 8
"""Past it the reader's link that was idle longest is hung up on."""
MAX_GREETING = 64
"""Connections that have not shown yet whose they are: past this the first of them is hung up on."""
GREETING_S = 3.0
"""In which they must."""
REQUEST_S = 5.0
"""For what follows the first frame of a request."""
IDLE_S = 600.0
"""A link over which nothing is asked for so long is hung up on."""
PAUSE_S = 0.1
"""After an accept that failed: for want of descriptors, memory or threads, of which others may give some back."""
BACKLOG = 64
_GONE = frozenset((errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP))
"""Errors of a listener that will accept nothing any more."""

log = structlog.get_logger("layerflow.hosts.peer.exporter")


@dataclass(slots=True, eq=False)
class _Link:
    """One connection.

    :param reader: whose it is, by name; empty = it has not shown that yet.
    :param idle_since: monotonic seconds; infinite while a request is answered.
    """

    connection: socket.socket
    address: str
    reader: bytes = b""
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def principal(self) -> bytes:
        """Whose it is, with all the others of the same key."""
        return self.reader[:PRINCIPAL_BYTES]

    @property
    def busy(self) -> bool:
        """Is a request being answered?"""
        return self.idle_since == math.inf

    def hang_up(self) -> None:
        """Hang up; the connection's thread, which may wait for the other end, sees to the rest."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Links:
    """Listens, and serves.

    :param arena: what grants say of it is read here. :param lender: moves bytes out of it.
    :param address: host and port, 0 = any.
    :param incarnation: of this exporter. :param exporter_key: from which the keys of its readers follow.
    :param ended: told that nothing is accepted any more; on the accepting thread, the last thing it does.
    :raises OSError: nobody can listen there.
    """

    def __init__(
        self,
        arena: SharedMemory,
        lender: Lender,
        grants: Grants,
        *,
        address: tuple[str, int],
        incarnation: bytes,
        exporter_key: bytes,
        ended: Callable[[], None],
    ) -> None:
        self._arena, self._lender, self._grants = arena, lender, grants
        self._incarnation, self._key, self._ended = incarnation, exporter_key, ended
        self._listener = socket.create_server(address, backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._greeting: ExpiringSet[_Link] = ExpiringSet(MAX_GREETING)
        self._links: dict[_Link, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._read_bytes = self._read_objects = self._refused = self._failed_accepts = 0

    def start(self) -> None:
        """Accept, on a thread."""
        OwnedThread("layerflow-accept", self._accept, lost=lambda _: self._ended()).start()

    def statistics(self) -> dict[str, float]:
        """Counters and gauges."""
        with self._lock:
            return {
                "links": len(self._links),
                "greeting_links": len(self._greeting),
                "lent_leases": len(self._grants),
                "read_bytes_total": self._read_bytes,
                "read_objects_total": self._read_objects,
                "refused_links_total": self._refused,
                "failed_accepts_total": self._failed_accepts,
            }

    def _accept(self) -> None:
        """:raises OSError: the listener is gone."""
        while True:
            connection: socket.socket | None = None
            try:
                connection, address = self._listener.accept()
                self._begin(_Link(connection, f"{address[0]}:{address[1]}"))
            except (OSError, RuntimeError) as error:
                if connection is not None:
                    connection.close()
                elif isinstance(error, OSError) and (error.errno in _GONE or self._listener.fileno() < 0):
                    raise
                with self._lock:
                    self._failed_accepts += 1
                log.warning("accept_failed", error=str(error), again_in_s=PAUSE_S)
                time.sleep(PAUSE_S)

    def _begin(self, link: _Link) -> None:
        """:raises RuntimeError: there is no thread for it."""
        with self._lock:
            oldest = self._greeting.add(link)  # its thread may end later; the next one to go is another
        if oldest is not None:
            oldest.hang_up()
        try:
            threading.Thread(target=self._serve, args=(link,), name="layerflow-link", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._greeting.discard(link)
            raise

    def _serve(self, link: _Link) -> None:
        connection = link.connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._admit(link, greet(connection, self._key, GREETING_S))
            with contextlib.closing(self._lender.open(self._incarnation)) as lent:
                lent.introduce(connection)
                while True:
                    self._answer(link, lent)
        except LinkClosed:
            pass
        except (ProtocolError, LinkFailed, LinkStalled, OSError) as error:
            self._refuse(link.address, str(error))
        finally:
            with self._lock:
                self._greeting.discard(link)
                self._links.pop(link, None)
            with contextlib.suppress(OSError):
                connection.close()

    def _admit(self, link: _Link, reader: bytes) -> None:
        """Admit a connection as its reader's.

        :raises LinkFailed: there is no room for one more.
        """
        with self._lock:
            if not self._greeting.discard(link):
                raise LinkClosed("it took too long to greet")
            link.reader, link.idle_since = reader, time.monotonic()
            gone = self._first_to_go(link)
            if gone is not None:
                del self._links[gone]
            self._links[link] = None
        if gone is not None:
            gone.hang_up()

    def _first_to_go(self, comer: _Link) -> _Link | None:
        """Which link makes room for one more; None = there is room.

        Past what one reader may have it is one of its own. Where all are taken it is one of the principal that has
        most, the new one counted: that which was idle longest, or if it has more than the comer's, one that is read.

        :raises LinkFailed: all that might are read.
        """
        crowd = [link for link in self._links if link.reader == comer.reader]
        counts = Counter(link.principal for link in (*self._links, comer))
        if len(crowd) < MAX_LINKS_OF_READER:
            if len(self._links) < self._lender.most:
                return None
            most = max(counts.values())
            fullest = [link for link in self._links if counts[link.principal] == most]
            crowd = [link for link in fullest if link.principal == comer.principal] or fullest
        gone = min(crowd, key=lambda link: link.idle_since)
        if gone.busy and counts[gone.principal] <= counts[comer.principal]:
            raise LinkFailed(f"{len(crowd)} links are open that could make room for one more, and all of them are read")
        return gone

    def _refuse(self, reader: str, why: str) -> None:
        with self._lock:
            self._refused += 1
        log.warning("link_refused", reader=reader, error=why)

    def _answer(self, link: _Link, lent: LentLink) -> None:
        """One request.

        :raises LinkClosed: the other end has hung up, or asks for nothing.
        """
        connection, raw = link.connection, bytearray(REQUEST.size)
        try:
            receive(connection, [memoryview(raw)], IDLE_S)
        except LinkStalled as error:
            raise LinkClosed(str(error)) from None
        link.idle_since = math.inf
        try:
            self._give(connection, lent, bytes(raw))
        finally:
            link.idle_since = time.monotonic()

    def _give(self, connection: socket.socket, lent: LentLink, request: bytes) -> None:
        magic, count, token, turn = REQUEST.unpack(request)
        if magic != REQUEST_MAGIC or not 0 < count <= MAX_LINK_ITEMS:
            raise ProtocolError(f"no request: {magic!r} with {count} items")
        table = bytearray(count * ITEM.size)
        receive(connection, [memoryview(table)], REQUEST_S)
        items = [(position, start, length) for position, _, start, length in ITEM.iter_unpack(table)]
        until = time.monotonic() + LEND_S  # all of them wait until then, not each so long
        with self._grants.read(token, connection, until) as grant:
            states = [self._state(grant, *item, until=until) for item in items]
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

    def _state(self, grant: ReadGrant | None, position: int, start: int, length: int, *, until: float) -> int:
        """Whether it may be read; a status. What is not stored yet is waited for until then."""
        if grant is None:
            return GONE
        status = grant.check(self._arena.read, position, start, length)
        if status == NOT_YET:
            self._grants.wait(grant, position, start + length, until)
            status = grant.check(self._arena.read, position, start, length)
        return status


NO_LINKS, FATAL = 1, 3
_READ_BYTES = 1 << 18


class Exporter:
    """One exporter, from the first message to its end. The main thread hears the server; links have their own.

    :param connection: to the server; blocking.
    """

    def __init__(self, connection: socket.socket, arena: SharedMemory) -> None:
        self._connection, self._arena = connection, arena
        self._sending = threading.Lock()
        self._grants = Grants(lambda lease: self._tell(Withdrawn(lease)), arena.nbytes)
        self._links: Links | None = None

    def run(self) -> int:
        """Until the server says Stop or is gone; the exit code."""
        frames = Frames()
        while data := self._read():
            try:
                for body in frames.feed(data):
                    message = decode_to_host(body)
                    if isinstance(message, Stop):
                        return 0
                    if not self._obey(message):
                        return FATAL
            except ProtocolError as error:
                log.error("host_misled", error=str(error))
                return FATAL
        return 0

    def _obey(self, message: Any) -> bool:
        match message:
            case Start():
                return self._start(message.options)
            case Lend():
                try:
                    self._grants.lend(message)
                except LayerflowError as error:
                    log.error("host_misled", error=str(error))
            case Extend():
                self._grants.extend(message)
            case Withdraw():
                self._grants.withdraw(message.lease)
            case Ping():
                self._tell(Pong(message.id, self._links.statistics() if self._links is not None else {}))
            case _:
                log.error("host_misled", error=f"an exporter was sent {type(message).__name__}")
        return True

    def _start(self, options: dict[str, Any]) -> bool:
        try:
            where, incarnation = (options["host"], options["port"]), bytes.fromhex(options["incarnation"])
            key = bytes.fromhex(options["key"])
            lender = named(links()[options["link"]].lender)(self._arena, options["shown"])
            self._links = Links(
                self._arena,
                lender,
                self._grants,
                address=where,
                incarnation=incarnation,
                exporter_key=key,
                ended=_no_links,
            )
        except Unusable as error:
            self._tell(Down(f"peers.link = {options['link']!r}: {error}", fatal=True))
            return False
        except OSError as error:
            told = f"{options['host']}:{options['port']}: {error.strerror}"
            self._tell(Down(f"cannot listen on {told}; see peers.link_address", fatal=True))
            return False
        self._links.start()
        self._tell(Up({"port": self._links.port}))
        return True

    def _read(self) -> bytes:
        try:
            return self._connection.recv(_READ_BYTES)
        except OSError:
            return b""

    def _tell(self, message: ToServer) -> None:
        with self._sending:
            try:
                self._connection.sendall(encode(message))
            except OSError as error:
                log.warning("server_unreachable", message=type(message).__name__, error=str(error))


def _no_links() -> None:
    """An exporter that accepts nobody is of no use: its server starts another."""
    os._exit(NO_LINKS)


def main() -> None:
    """Serve one server until it is gone."""
    prepare_descriptors()
    code = Exporter(*connect("layerflow.hosts.peer.exporter", __doc__ or "", writable=False)).run()
    os._exit(code)


if __name__ == "__main__":
    main()

"""``python -m layerflow.hosts.peer.exporter``: lets other servers read what its own server lends them of the arena.

Started by a server, never by hand. It writes nothing: its mapping of the arena, where it has one, is for reading.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import structlog

from layerflow.backends import named
from layerflow.errors import LayerflowError, ProtocolError
from layerflow.hosts.arguments import connect
from layerflow.hosts.backend import Unusable
from layerflow.hosts.peer.grants import Grants
from layerflow.hosts.peer.serving import Links
from layerflow.links import links
from layerflow.system.descriptors import prepare_descriptors
from layerflow.system.memfd import SharedMemory
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

NO_LINKS, FATAL = 1, 3
_READ_BYTES = 1 << 18

log = structlog.get_logger("layerflow.hosts.peer.exporter")


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
            self._links = Links(self._arena, lender, self._grants, where, incarnation, key, _no_links)
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

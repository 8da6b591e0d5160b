"""A client's socket: dialling, greeting and attaching, and shared memory from the fd server. Every call here waits."""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq

from layerflow._version import __version__
from layerflow.errors import ConfigError, DeadlineExceeded, ProtocolError, RemoteError, ServerLost
from layerflow.wire import codec
from layerflow.wire.client_connection import MAX_REPLY_BYTES, ClientConnection, ClientState
from layerflow.wire.messages import (
    WANT_ARENA,
    WANT_PRESENCE,
    Attach,
    Attached,
    Hello,
    Message,
    PeerHello,
    Problem,
    ToClient,
    Welcome,
)

_FD_SERVER_HEADER = 8


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """CURVE keys for a server on another host, Z85, 40 characters each.

    :param server: the server's public key.
    :param public: this client's public key, on the server's allow-list.
    :param secret: this client's secret key.
    """

    server: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ClientKeys(server={self.server!r}, public={self.public!r}, secret=<hidden>)"


def dial(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClientKeys | None = None) -> zmq.Socket[bytes]:
    """A DEALER towards the server; connecting happens in the background.

    :raises ConfigError: the endpoint is none, or tcp without keys.
    """
    if endpoint.startswith("tcp://") and keys is None:
        raise ConfigError(f"{endpoint}: servers on other hosts need CURVE keys; pass keys=ClientKeys(...)")
    try:
        dealer = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        if error.errno == errno.EMFILE:
            raise ServerLost(f"{endpoint}: {error.strerror}") from None
        raise ConfigError(f"{endpoint}: its ZMQ context has ended; was the embedded server closed?") from None
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    try:
        if keys is not None:
            dealer.curve_serverkey = keys.server
            dealer.curve_publickey = keys.public
            dealer.curve_secretkey = keys.secret
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close()
        raise ConfigError(f"{endpoint}: no such endpoint, or no CURVE keys: {error.strerror}") from None
    return dealer


class Handshake:
    """Request and reply over a DEALER that one thread owns.

    :ivar protocol: of the connection; there is one from :meth:`greet` on.
    :ivar connection: to the fd server, where there is one: its hang-up tells at once that the server has died.
    """

    def __init__(self, dealer: zmq.Socket[bytes], on_other: Callable[[ToClient], None] | None = None) -> None:
        self.dealer = dealer
        self.protocol: ClientConnection
        self.connection: socket.socket | None = None
        self._on_other = on_other
        self._version = codec.PROTOCOL_VERSION

    def send(self, message: Message) -> None:
        """:raises ServerLost: the server has not read for so long that the socket is full.
        :raises VersionMismatch: it is of a version that has no such message.
        """
        codec.check_spoken(message, self._version)
        self.send_raw(codec.encode_request(message))

    def send_raw(self, frame: bytes) -> None:
        """:raises ServerLost: as for :meth:`send`."""
        try:
            self.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ServerLost("the server does not read; is it stopped?") from None
        except zmq.ZMQError as error:
            raise ServerLost(f"the connection has ended: {error.strerror}") from None

    def receive(self, deadline: float) -> bytes:
        """One frame.

        :raises DeadlineExceeded: none came by `deadline` (monotonic seconds).
        :raises ServerLost: the server has hung up, or the context has ended.
        """
        wait_ms = max(0, round((deadline - time.monotonic()) * 1e3))
        try:
            if not self._poll(wait_ms):
                where = self.dealer.get_string(zmq.LAST_ENDPOINT)
                raise DeadlineExceeded(f"the server at {where} did not answer in time; is it running there?")
            frames = self.dealer.recv_multipart()
        except zmq.ZMQError as error:
            raise ServerLost(f"the connection has ended: {error.strerror}") from None
        if len(frames) != 1:
            raise ProtocolError(f"the server sent {len(frames)} frames where one belongs")
        return frames[0]

    def _poll(self, wait_ms: int) -> bool:
        """Is there a frame, within `wait_ms`?"""
        if self.connection is None:
            return bool(self.dealer.poll(wait_ms))
        poller = zmq.Poller()
        poller.register(self.dealer, zmq.POLLIN)
        poller.register(self.connection.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        if self.dealer not in ready and ready:
            raise ServerLost("the server has hung up")
        return bool(ready)

    def next(self, deadline: float) -> ToClient:
        """The next message, once the hello was said.

        :raises LayerflowError: none came, or the connection is of no more use; see :meth:`receive`.
        """
        frame = self.receive(deadline)
        return self.protocol.receive(frame, time.monotonic())

    def expect(self, kind: type[Message], deadline: float, number: int | None = None) -> ToClient:
        """The next message of this kind (and id); others are passed on.

        :raises RemoteError: the server answered with a Problem.
        :raises DeadlineExceeded: see :meth:`receive`.
        """
        while True:
            message = self.next(deadline)
            if isinstance(message, Problem) and (number is None or message.id in (number, -1)):
                raise RemoteError(message.code, message.message)
            if isinstance(message, kind) and (number is None or getattr(message, "id", number) == number):
                return message
            if self._on_other is not None:
                self._on_other(message)

    def greet(self, hello: Hello | PeerHello, deadline: float) -> None:
        """Greet, and say hello; the next message is the welcome, or a refusal.

        :raises VersionMismatch: the server speaks another protocol.
        """
        self.protocol = ClientConnection(hello)
        self.send_raw(self.protocol.greeting)
        while self.protocol.state is ClientState.GREETING:
            if answer := self.protocol.greeted(self.receive(deadline)):
                self.send_raw(answer)
        self._version = self.protocol.version

    def introduce(self, engine: str, client: str, deadline: float, name: str = "") -> Welcome:
        """Greeting, hello and welcome.

        :param name: what the engine is called; "" = `engine`.
        :raises VersionMismatch: the server speaks another protocol.
        """
        self.greet(Hello(engine, client, os.getpid(), name, __version__), deadline)
        return cast(Welcome, self.expect(Welcome, deadline))

    def attach(self, attach: Attach, deadline: float) -> Attached:
        """Tell what this client caches.

        :raises RemoteError: refused.
        """
        self.send(attach)
        return cast(Attached, self.expect(Attached, deadline))


def fetch_arena(path: Path, token: bytes, deadline: float) -> tuple[socket.socket, int, int]:
    """Ask at the fd server: the open connection (keep it: it is the sign of life), the memfd and its size.

    :raises ServerLost: no server answers there, or the token is refused.
    """
    connection, fd, nbytes = _enter(path, token + WANT_ARENA, deadline)
    if fd is None:
        connection.close()
        raise ServerLost(f"{path}: the server has no arena to hand out")
    return connection, fd, nbytes


def fetch_presence(path: Path, token: bytes, deadline: float) -> tuple[socket.socket, int | None, int]:
    """As :func:`fetch_arena`, for the presence table; None and 0 where the server keeps none.

    :raises ServerLost: no server answers there, or the token is refused.
    """
    return _enter(path, token + WANT_PRESENCE, deadline)


_signs_of_life: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections of this process to fd servers. A forked child closes its copies: it would keep a dead engine alive."""


def _close_in_child() -> None:
    for connection in list(_signs_of_life):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def _enter(path: Path, wish: bytes, deadline: float) -> tuple[socket.socket, int | None, int]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        connection.connect(str(path))
        connection.sendall(wish)
        said, fds, _, _ = socket.recv_fds(connection, _FD_SERVER_HEADER, 1)
    except OSError as error:
        connection.close()
        raise ServerLost(f"{path}: no shared memory can be fetched: {error}") from None
    nbytes = int.from_bytes(said, "little")
    if len(said) != _FD_SERVER_HEADER or len(fds) != (nbytes > 0):
        for fd in fds:
            os.close(fd)
        connection.close()
        raise ServerLost(f"{path}: the server hung up instead of handing out shared memory")
    connection.setblocking(False)
    _signs_of_life.add(connection)
    return connection, fds[0] if fds else None, nbytes

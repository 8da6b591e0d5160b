"""One server that this one reads from: the connection to its control socket, and whether it can be counted on."""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
import zmq

from layerflow._version import __version__
from layerflow.errors import LayerflowError, ProtocolError, RemoteError, SessionUnknown, VersionMismatch, shortened
from layerflow.server.mailboxes import SLICE_S
from layerflow.system.descriptors import FOR_CLIENTS, has_room
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.client_connection import ClientConnection, ClientState
from layerflow.wire.messages import Message

# A server's connection to the control socket of another one: a ZMQ DEALER read from asyncio's own loop.


MAX_UNSENT = 1000
"""Messages that wait in ZMQ to be sent."""
MAX_UNREAD = 16
"""Messages that wait in ZMQ to be read, each as large as one may be. Those behind them are not lost: ZMQ does not read
them from the connection, so that they stay with the peer, which bounds them and hangs up on who reads nothing."""
DESCRIPTORS = 6
"""Of one connection, with ZMQ's own and the monitor's."""


class Dealer:
    """Connects at once, on the running loop. ZMQ connects again by itself; its owner decides what counts.

    :param keys: (server's public, own secret and public) CURVE keys in Z85; None = ``ipc://``.
    :param on_message: told each message.
    :param hung_up: told that the connection was lost; perhaps several times.
    :raises OSError: few file descriptors are left. libzmq is not asked for what it may end the process over.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: tuple[bytes, bytes, bytes] | None,
        *,
        max_bytes: int,
        on_message: Callable[[bytes], None],
        hung_up: Callable[[], None],
    ) -> None:
        self._on_message, self._hung_up = on_message, hung_up
        self._loop = asyncio.get_running_loop()
        self._again = False
        self._closed = False
        if not has_room(DESCRIPTORS, FOR_CLIENTS):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            socket.curve_serverkey, socket.curve_secretkey, socket.curve_publickey = keys
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fds = int(socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))
        for fd in self._fds:
            self._loop.add_reader(fd, self._read)
        socket.connect(endpoint)
        self._schedule()

    def send(self, frame: bytes) -> bool:
        """Queue one frame; False = too many wait already."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._schedule()
        return True

    def close(self) -> None:
        """Hang up; nothing is told any more."""
        if self._closed:
            return
        self._closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _schedule(self) -> None:
        if not self._again and not self._closed:
            self._again = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """ZMQ's descriptors tell of changes only: read until nothing is left, or come back behind others' turns."""
        self._again = False
        until = time.monotonic() + SLICE_S
        while not self._closed:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._on_message(frames[0])
            elif int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                self._hung_up()
            else:
                return
            if time.monotonic() >= until:
                self._schedule()
                return


FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
"""Before it is tried again, doubling; meanwhile it is not asked for anything."""
MISMATCH_DELAY_S = 30.0
"""The same for one that speaks another protocol: somebody may upgrade it."""
ANSWER_S = 5.0
"""A server that does not welcome this one for so long is tried again."""

log = structlog.get_logger("layerflow.server.peers")


PeerNews = wire.PeerFound | wire.PeerProgress | wire.PeerCompared | wire.PeerPartitions | wire.PeerHandoffState
"""What a peer says of objects, models and hand-offs."""


class AttachmentState(enum.Enum):
    """Where the connection to a peer is."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


_STATES = {
    ClientState.GREETING: AttachmentState.CONNECTING,
    ClientState.HELLO: AttachmentState.CONNECTING,
    ClientState.WELCOMED: AttachmentState.UP,
    ClientState.CLOSED: AttachmentState.DOWN,
}


class PeerListener(Protocol):
    """One that reads from peers. Called on the loop."""

    def peer_up(self, peer: PeerAttachment) -> None:
        """A peer can be read from; again whenever its exporter is another."""

    def peer_changed(self, peer: PeerAttachment) -> None:
        """A peer's state, or where it can be read, is another."""

    def peer_lost(self, peer: PeerAttachment, why: str) -> None:
        """Nothing that it has lent counts any more."""

    def peer_said(self, peer: PeerAttachment, message: PeerNews) -> None:
        """An answer, or news of open objects."""

    def peer_refused(self, peer: PeerAttachment, number: int, why: str) -> None:
        """A question was not answered, and nothing was lent."""

    def peer_renewed(self, peer: PeerAttachment, sent: float, leases: list[int]) -> None:
        """A peer's leases last on, from `sent` (monotonic seconds) at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTarget:
    """Where a peer is. :param keys: CURVE: its public key, this server's secret and public ones; None = ``ipc://``."""

    name: str
    address: str
    link: str
    keys: tuple[bytes, bytes, bytes] | None = None


class PeerAttachment:
    """Connects, greets, keeps the connection alive, and connects again. On one loop.

    :param incarnation: of this server.

    :ivar welcome: what the peer last said of itself; None = it is not up.
    """

    def __init__(
        self,
        target: PeerTarget,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: bytes,
        *,
        name: str,
        max_bytes: int,
        listener: PeerListener,
    ) -> None:
        self.target = target
        self.reason = "starting"
        self.welcome: wire.PeerWelcome | None = None
        self.attempts = 0
        self._context, self._max_bytes = context, max_bytes
        self._hello = wire.PeerHello(name, incarnation, os.getpid(), __version__)
        self._protocol = ClientConnection(self._hello, max_bytes=max_bytes)
        self._listener = listener
        self._dealer: Dealer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._delay = 0.0
        self.used_at = self.away_since = time.monotonic()
        self.renew: Callable[[], list[int]] = list  #: leases that are needed for longer

    def start(self) -> None:
        """Connect, on the running loop."""
        self._connect()

    def close(self) -> None:
        """Leave."""
        if self._dealer is not None and self.up:
            self.send(wire.Bye())
        self._hang_up()

    def send(self, message: Message) -> bool:
        """False: it does not read.

        :raises VersionMismatch: it is of a version that has no such message.
        """
        codec.check_spoken(message, self._protocol.version)
        return self._dealer is not None and self._dealer.send(codec.encode(message))

    @property
    def state(self) -> AttachmentState:
        """Where the connection is."""
        return _STATES[self._protocol.state]

    @property
    def up(self) -> bool:
        """Whether the peer can be asked."""
        return self._protocol.state is ClientState.WELCOMED

    @property
    def other_link(self) -> bool:
        """Whether the peer lends over other links than the one configured here: only new settings change that."""
        return self.welcome is not None and self.up and bool(self.welcome.endpoints) and self.endpoint() is None

    @property
    def unreadable(self) -> str:
        """Why nothing is read from it though it is up; "" = it is read, or down."""
        if self.welcome is None or not self.up or self.endpoint() is not None:
            return ""
        offered = ", ".join(one.link for one in self.welcome.endpoints)
        if not offered:
            return "its exporter is not up"
        return f"it lends over {offered}, and peers.link here is {self.target.link}: they have to be the same"

    def endpoint(self) -> wire.PeerEndpoint | None:
        """Where its bytes are read, over the link that is configured; None = nowhere now."""
        if self.welcome is None or not self.up:
            return None
        offered = [one for one in self.welcome.endpoints if one.link == self.target.link]
        if not offered:
            return None
        host = self.target.address.removeprefix("tcp://").rpartition(":")[0]
        host = host if self.target.address.startswith("tcp://") else "127.0.0.1"
        found = offered[0]
        return msgspec.structs.replace(found, address=host + found.address) if found.address.startswith(":") else found

    # The connection ------------------------------------------------------------------------------

    def _connect(self) -> None:
        self.attempts += 1
        self._protocol = ClientConnection(self._hello, max_bytes=self._max_bytes)
        try:
            self._dealer = Dealer(
                self._context,
                self.target.address,
                self.target.keys,
                max_bytes=self._max_bytes,
                on_message=self._received,
                hung_up=self._hung_up,
            )
        except (zmq.ZMQError, OSError) as error:
            self._fail(f"cannot connect to {self.target.address}: {error}")
            return
        self._dealer.send(self._protocol.greeting)
        self._later(ANSWER_S, self._unanswered)

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        self._protocol.close()

    def _unanswered(self) -> None:
        self._fail(f"no answer from {self.target.address} for {ANSWER_S:g} s: is it running, and is this server's key "
                   "on its allow-list?")  # fmt: skip

    def _hung_up(self) -> None:
        """ZMQ has lost the connection; a server that comes back there may be another."""
        if self._protocol.state is not ClientState.GREETING:
            self._fail("it has hung up")

    def _fail(self, why: str, delay: float | None = None) -> None:
        """Lost, or never had: try again later."""
        why = shortened(why)
        was_up = self.welcome is not None
        if was_up or why != self.reason:
            log.warning("peer_down", peer=self.target.name, address=self.target.address, reason=why)
        self._hang_up()
        self.reason, self.welcome = why, None
        self._delay = FIRST_DELAY_S if was_up else min(max(2 * self._delay, FIRST_DELAY_S), LAST_DELAY_S)
        self._later(self._delay if delay is None else delay, self._connect)
        if was_up:
            self.away_since = time.monotonic()
            self._listener.peer_lost(self, why)
        self._listener.peer_changed(self)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, call)

    def _beat(self) -> None:
        now = time.monotonic()
        if silent_s := self._protocol.silent_s(now):
            self._fail(f"silent for {silent_s:.1f} s")
            return
        self.send(wire.PeerBeat(now, self.renew()))
        self._beat_later(now)

    def _beat_later(self, now: float) -> None:
        self._protocol.beat_sent(now)
        self._later(self._protocol.heartbeat_s, self._beat)

    # What it says --------------------------------------------------------------------------------

    def _received(self, frame: bytes) -> None:
        assert self._dealer is not None
        try:
            if self._protocol.state is ClientState.GREETING:
                if answer := self._protocol.greeted(frame):
                    self._dealer.send(answer)
            else:
                self._handle(self._protocol.receive(frame, time.monotonic()))
        except VersionMismatch as error:
            self._fail(str(error), MISMATCH_DELAY_S)
        except SessionUnknown as error:
            self._fail(str(error))
        except RemoteError as error:
            self._fail(f"it refuses: {error.message}", LAST_DELAY_S)
        except LayerflowError as error:
            self._fail(f"it says what cannot be: {error}", LAST_DELAY_S)

    def _handle(self, message: wire.ToClient) -> None:
        match message:
            case wire.PeerWelcome():
                self._welcomed(message)
            case (
                wire.PeerFound()
                | wire.PeerProgress()
                | wire.PeerCompared()
                | wire.PeerPartitions()
                | wire.PeerHandoffState()
            ):
                if self.up:
                    self._listener.peer_said(self, message)
            case wire.PeerBeat():
                # A lease that is renewed lasts from when this server asked for that, which cannot be in the future.
                self._listener.peer_renewed(self, min(message.sent, time.monotonic()), message.renew)
            case wire.Problem() if message.id >= 0:
                self._listener.peer_refused(self, message.id, shortened(message.message))
            case wire.Problem():
                raise RemoteError(message.code, message.message)
            case _:
                raise ProtocolError(f"{type(message).__name__} to a server that reads")

    def _welcomed(self, message: wire.PeerWelcome) -> None:
        if self.welcome is not None and self.welcome.incarnation != message.incarnation:
            self._fail("another server answers at its address")
            return
        exporters = [one.incarnation for one in self.welcome.endpoints] if self.welcome is not None else []
        fresh, self.welcome = self.welcome is None, message
        if fresh:
            self.reason, self._delay = "", 0.0
            log.info("peer_up", peer=self.target.name, address=self.target.address, version=message.version)
            self._beat_later(time.monotonic())  # the hello was the first sign of life
        elif exporters != [one.incarnation for one in message.endpoints]:
            self._listener.peer_lost(self, "its exporter is gone")
        self._listener.peer_up(self)
        self._listener.peer_changed(self)

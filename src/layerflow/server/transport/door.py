"""The control socket: ZMTP over a stream socket of its own for each client, on the server's loop.

Clients are ZMQ sockets. The server's end is not libzmq's, because libzmq cannot say how many bytes of whose
half-received messages and unread answers it keeps, cannot hang up on one client, and ends the process where descriptors
run out. Here each client's bytes are counted, and what is too much ends that client's connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from layerflow.errors import ConfigError, ProtocolError
from layerflow.observe.logs import SourceLogLimit
from layerflow.system.descriptors import FOR_CLIENTS, leaves
from layerflow.system.numbers import ascending
from layerflow.system.unix_sockets import BACKLOG, listen_privately, peer_process, peer_user, peer_user_is_own
from layerflow.wire.zmtp import Mechanism, Null, Parsed, Rejected, Zmtp

READ_BYTES = 256 << 10
READ_S = 0.0005
"""How long messages that have come are handled before the loop's timers and other descriptors get their turn, in
seconds: what others wait for, beside a client that never stops sending."""

HANDSHAKE_S = 5.0
"""How long a client may take from connecting to the end of ZMTP's handshake."""
STRANGER_S = 8.0
"""How long a connection without a session may stay."""
MAX_STRANGERS = 64
"""Connections without a session. Beyond it, whichever process or address has the most of them loses one."""

MESSAGE_S = 30.0
"""How long a message may take from its first byte to its last."""
HALF_RECEIVED_BYTES = 64 << 20
"""Of all clients' half-received messages above 64 KiB, but at least four of the largest size. Beyond it,
whichever process or address has the most of them loses one."""

THROTTLE_BYTES = 1 << 20
"""A client with so many bytes of unread answers is not listened to until it has read them."""
UNREAD_BYTES = 32 << 20
"""A client with more unread answers is hung up on; a single answer may be larger."""
ALL_UNREAD_BYTES = 128 << 20
"""Of all clients' unread answers. Past it, of whichever process or address has the most, the connection with most of
them is hung up on."""
UNREAD_S = 30.0
"""A client that reads nothing of its answers for so long is hung up on."""

PAUSE_S = 0.25
"""How long no connection is accepted after one had to be turned away."""
FLUSH_S = 0.1
"""How long the last messages may take to leave when the server ends; a stopped client holds up no exit."""
_SWEEP_S = 1.0

log = structlog.get_logger("layerflow.server.transport.door")


@dataclass(frozen=True, slots=True)
class DoorStatistics:
    """A snapshot. `strangers` have no session; `turned_away` and `hung_up_on` count since the start."""

    connections: int
    strangers: int
    half_received_bytes: int
    unread_bytes: int
    turned_away: int
    hung_up_on: int


class DoorConnection:
    """One client's. :param who: the process or host at its other end."""

    __slots__ = ("closed", "identity", "listened_to", "message_since", "queued", "since", "socket", "unread",
                 "unread_since", "unsealing", "who", "writing", "zmtp")  # fmt: skip

    def __init__(self, identity: bytes, sock: socket.socket, who: str, zmtp: Zmtp) -> None:
        self.identity = identity
        self.socket = sock
        self.who = who
        self.zmtp = zmtp
        self.since = time.monotonic()  #: when it came, or lost its session
        self.message_since = 0.0  #: when the message that has not ended was first seen unfinished; 0 = there is none
        self.unread = bytearray()
        self.unread_since = 0.0  #: since when the client has read nothing of it
        self.queued = False  #: messages that have come wait for its turn
        self.listened_to = False
        self.unsealing = False  #: a large message is being opened on another thread
        self.writing = False
        self.closed = False

    @property
    def throttled(self) -> bool:
        """Has it to read its answers first?"""
        return len(self.unread) > THROTTLE_BYTES


class Door:
    """Listens on the running loop, from :meth:`start` to :meth:`close`.

    :param on_message: called with the client's identity and its message's only frame; None in its place: there were
        several, which were dropped as they came.
    :param on_hang_up: called, never from within another call, with the identity of a client that is gone.
    :param known: has this client a session? Those without one are few, may send nothing large, and are closed soon.
    :param max_bytes: of a client's message.
    :param mechanism: makes a connection's end of the security mechanism.
    """

    def __init__(
        self,
        on_message: Callable[[bytes, bytes | None], None],
        on_hang_up: Callable[[bytes], None],
        known: Callable[[bytes], bool],
        max_bytes: int,
        mechanism: Callable[[], Mechanism] = Null,
    ) -> None:
        self._on_message = on_message
        self._on_hang_up = on_hang_up
        self._known = known
        self._max_bytes = max_bytes
        self._most_half_received = max(HALF_RECEIVED_BYTES, 4 * max_bytes)
        self._mechanism = mechanism
        self._connections: dict[bytes, DoorConnection] = {}
        self._strangers: dict[bytes, DoorConnection] = {}  # may have a session by now, oldest first
        self._names = ascending()
        self._readable = select.poll()  # all that are listened to: does something wait in the kernel?
        self._queue: deque[DoorConnection] = deque()
        self._scheduled = False
        self._unsealing = 0
        self._listener: socket.socket | None = None
        self._accepting = False
        self._path: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._log_limit = SourceLogLimit()
        self._turned_away = self._hung_up_on = 0

    def bind(self, endpoint: str) -> str:
        """Listen at ``ipc://path`` or ``tcp://address:port``; the endpoint as bound, with the port for ``*``.

        :raises ConfigError: the address is in use or not usable.
        """
        if endpoint.startswith("ipc://"):
            self._path = Path(endpoint.removeprefix("ipc://"))
            self._listener = listen_privately(self._path)
            return endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = "" if host == "*" else host.strip("[]")
        try:
            found = socket.getaddrinfo(host or None, 0 if port == "*" else int(port), type=socket.SOCK_STREAM,
                                       flags=socket.AI_PASSIVE)  # fmt: skip
            family, kind, protocol, _, address = found[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}; is another server running there?"
            ) from None
        self._listener = listener
        host, port = listener.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def start(self) -> None:
        """Begin accepting."""
        self._loop = asyncio.get_running_loop()
        self._resume()
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def close(self) -> None:
        """Hang up on every client; what is unsent after :data:`FLUSH_S` is dropped."""
        self._pause(0.0)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        until = time.monotonic() + FLUSH_S
        for connection in list(self._connections.values()):
            if connection.unread:
                connection.socket.settimeout(max(0.001, until - time.monotonic()))
                with contextlib.suppress(OSError):
                    connection.socket.sendall(connection.unread)
            self._drop(connection)
        self._loop = None

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send one frame to a client, or queue it; False: the client is gone, or has just been hung up on."""
        connection = self._connections.get(identity)
        if connection is None:
            return False
        return self._write(connection, connection.zmtp.frame(frame))

    def hang_up(self, identity: bytes, why: str) -> None:
        """End a client's connection; nothing happens if it has ended."""
        connection = self._connections.get(identity)
        if connection is not None:
            self._hang_up(connection, why)

    def process_of(self, identity: bytes) -> int:
        """The process at the other end; 0 = it is at another host, in a pid namespace not seen from here, or gone."""
        connection = self._connections.get(identity)
        if connection is None or connection.closed or connection.socket.family != socket.AF_UNIX:
            return 0
        return peer_process(connection.socket)

    def key_of(self, identity: bytes) -> bytes:
        """The public key in Z85 that a client has shown and is admitted by; empty = it has shown none."""
        connection = self._connections.get(identity)
        return connection.zmtp.client_key if connection is not None else b""

    def pending(self) -> bool:
        """Does a message wait to be read? A client that has to read its own answers first does not count."""
        return bool(self._queue) or self._unsealing > 0 or bool(self._readable.poll(0))

    def statistics(self) -> DoorStatistics:
        """A snapshot."""
        return DoorStatistics(
            connections=len(self._connections),
            strangers=sum(not self._known(identity) for identity in self._connections),
            half_received_bytes=sum(one.zmtp.waiting for one in self._connections.values() if not one.queued),
            unread_bytes=sum(len(one.unread) for one in self._connections.values()),
            turned_away=self._turned_away,
            hung_up_on=self._hung_up_on,
        )

    # Coming ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._loop is not None
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._turn_away("accept failed", str(error))
            return
        if not leaves(accepted.fileno(), FOR_CLIENTS):
            accepted.close()
            self._turn_away("few file descriptors are left", "raise ulimit -n, or close connections")
            return
        accepted.setblocking(False)
        try:
            who = self._who(accepted)
        except OSError:  # it has left already
            accepted.close()
            return
        if who is None:
            accepted.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._make_room_for_stranger()
        identity = next(self._names).to_bytes(8, "big")
        zmtp = Zmtp(self._mechanism(), lambda size: self._admit(connection, size))
        connection = DoorConnection(identity, accepted, who, zmtp)
        self._connections[identity] = self._strangers[identity] = connection
        self._listen_to(connection)
        self._flush_handshake(connection)

    def _who(self, accepted: socket.socket) -> str | None:
        """The host or process at the other end; None: it is another user's, and not let in."""
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return str(accepted.getpeername()[0])
        if not peer_user_is_own(accepted):
            self._log("door_stranger", f"uid {peer_user(accepted)}", effect="it was turned away")
            return None
        return f"pid {peer_process(accepted)}"

    def _turn_away(self, why: str, advice: str) -> None:
        """No room: those who come wait in the kernel's queue for a while."""
        self._turned_away += 1
        self._pause(PAUSE_S)
        self._log("connection_turned_away", "", reason=why, advice=advice, pause_s=PAUSE_S)

    def _pause(self, seconds: float) -> None:
        if self._accepting and self._loop is not None and self._listener is not None:
            self._accepting = False
            self._loop.remove_reader(self._listener)
            if seconds:
                self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._loop is not None and self._listener is not None and not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _make_room_for_stranger(self) -> None:
        for identity in [identity for identity in self._strangers if self._known(identity)]:
            del self._strangers[identity]
        if len(self._strangers) >= MAX_STRANGERS:
            counts = Counter(stranger.who for stranger in self._strangers.values())
            most, _ = counts.most_common(1)[0]
            oldest = next(stranger for stranger in self._strangers.values() if stranger.who == most)
            self._hang_up(oldest, f"{MAX_STRANGERS} connections have no session")

    # Listening ------------------------------------------------------------------------------------

    def _listen_to(self, connection: DoorConnection) -> None:
        if not connection.listened_to:
            assert self._loop is not None
            connection.listened_to = True
            self._loop.add_reader(connection.socket, self._read, connection)
            self._readable.register(connection.socket, select.POLLIN)

    def _ignore(self, connection: DoorConnection) -> None:
        if connection.listened_to:
            assert self._loop is not None
            connection.listened_to = False
            self._loop.remove_reader(connection.socket)
            self._readable.unregister(connection.socket)

    def _read(self, connection: DoorConnection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        connection.zmtp.feed(data)
        self._handle(connection, time.monotonic() + READ_S / (1 + len(self._queue)))

    def _handle(self, connection: DoorConnection, until: float) -> None:
        """What has come of it whole; what is left at `until` waits for its next turn."""
        zmtp = connection.zmtp
        try:
            while not connection.closed and not connection.throttled and not connection.unsealing:
                try:
                    found = zmtp.next()
                except ProtocolError as error:
                    self._flush_handshake(connection)  # which may tell it why
                    if isinstance(error, Rejected):
                        self._hung_up_on += 1
                        self._end(connection)
                        self._log("curve_key_refused", connection.who, reason=str(error))
                    else:
                        self._hang_up(connection, str(error))
                    return
                if zmtp.output:
                    self._flush_handshake(connection)
                if found is Parsed.NOTHING:
                    break
                if found is Parsed.SEALED:
                    self._unseal(connection)
                    break
                if found is not Parsed.OTHER:
                    connection.message_since = 0.0  # this one has ended; what is behind it has just begun
                    self._on_message(connection.identity, None if found is Parsed.SEVERAL else found)
                if not zmtp.more or time.monotonic() >= until:
                    break
        finally:  # whatever a message's handling raises, those behind it are read
            if not connection.closed:
                if not zmtp.amid:
                    connection.message_since = 0.0
                elif not connection.message_since:
                    connection.message_since = time.monotonic()
                self._continue(connection)

    def _continue(self, connection: DoorConnection) -> None:
        """Listen to it again, or have it wait: for its turn, or until it has read."""
        if connection.queued:
            return
        if connection.unsealing:
            self._ignore(connection)
            return
        if not connection.throttled and not connection.zmtp.more:
            self._listen_to(connection)
            return
        self._ignore(connection)
        if not connection.throttled:
            connection.queued = True
            self._queue.append(connection)
            self._schedule()

    def _unseal(self, connection: DoorConnection) -> None:
        """Open a large message beside the loop: it takes 3 ms for each MiB."""
        assert self._loop is not None
        connection.unsealing = True
        self._unsealing += 1
        opening = self._loop.run_in_executor(None, connection.zmtp.unseal)
        opening.add_done_callback(lambda opened: self._unsealed(connection, opened))

    def _unsealed(self, connection: DoorConnection, opened: asyncio.Future[None]) -> None:
        error = opened.exception()  # looked at, whoever is gone meanwhile
        connection.unsealing = False
        self._unsealing -= 1
        if connection.closed:
            return
        if error is not None:
            self._hang_up(connection, str(error))
            return
        self._handle(connection, time.monotonic() + READ_S)

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None and self._queue:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One turn of each client that has messages waiting, as far as time allows."""
        self._scheduled = False
        until = time.monotonic() + READ_S
        try:
            for _ in range(len(self._queue)):
                connection = self._queue.popleft()
                connection.queued = False
                if not connection.closed:
                    now = time.monotonic()
                    self._handle(connection, now + max(0.0, until - now) / (1 + len(self._queue)))
                if time.monotonic() >= until:
                    break
        finally:
            self._schedule()

    def _admit(self, connection: DoorConnection, size: int) -> None:
        """May this client send so many bytes at once?

        :raises ProtocolError: no.
        """
        if size > self._max_bytes + 64:  # what a security mechanism adds
            raise ProtocolError(f"a message of {size} bytes exceeds server.max_message_bytes = {self._max_bytes}")
        if not self._known(connection.identity):
            raise ProtocolError(f"a message of {size} bytes of a client that has not said hello")
        others = [one for one in self._connections.values() if one is not connection and one.zmtp.unfinished]
        held = size + sum(one.zmtp.unfinished for one in others)
        if held <= self._most_half_received:
            return
        by_whom = Counter({connection.who: size})
        for one in others:
            by_whom[one.who] += one.zmtp.unfinished
        # A thread has the message that it opens: that memory does not come back by hanging up.
        others = sorted((one for one in others if not one.unsealing), key=lambda one: one.message_since)
        while others and held > self._most_half_received:
            # Of whom most is held; this connection's own message goes on in any case.
            most = max((one.who for one in others), key=by_whom.__getitem__)
            oldest = next(one for one in others if one.who == most)
            others.remove(oldest)
            held -= oldest.zmtp.unfinished
            by_whom[most] -= oldest.zmtp.unfinished
            self._hang_up(oldest, "its message does not end, and others wait to send theirs")
        if held > self._most_half_received:
            raise ProtocolError(f"a message of {size} bytes, while as many large ones as may be are being opened")

    # Sending --------------------------------------------------------------------------------------

    def _flush_handshake(self, connection: DoorConnection) -> None:
        output = connection.zmtp.output
        if output:
            data = bytes(output)
            output.clear()
            self._write(connection, data)

    def _write(self, connection: DoorConnection, data: bytes) -> bool:
        if connection.closed:
            return False
        sent = 0
        if not connection.unread:
            try:
                sent = connection.socket.send(data, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._end(connection)
                return False
            if sent == len(data):
                return True
            connection.unread_since = time.monotonic()
        elif len(connection.unread) + len(data) > UNREAD_BYTES:
            self._hang_up(connection, f"it does not read: {len(connection.unread)} bytes of answers wait for it")
            return False
        connection.unread += memoryview(data)[sent:]
        if not connection.writing:
            assert self._loop is not None
            connection.writing = True
            self._loop.add_writer(connection.socket, self._drain, connection)
        if connection.throttled:
            self._continue(connection)
            self._bound_unread()
        return not connection.closed

    def _drain(self, connection: DoorConnection) -> None:
        """The client has read."""
        assert self._loop is not None
        unread = connection.unread
        try:
            sent = connection.socket.send(memoryview(unread)[:READ_BYTES], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(connection)
            return
        throttled = connection.throttled
        del unread[:sent]
        connection.unread_since = time.monotonic()
        if not unread:
            connection.writing = False
            self._loop.remove_writer(connection.socket)
        if throttled and not connection.throttled:
            self._continue(connection)

    def _bound_unread(self) -> None:
        by_whom: Counter[str] = Counter()
        for one in self._connections.values():
            by_whom[one.who] += len(one.unread)
        if by_whom.total() > ALL_UNREAD_BYTES:
            [(who, _)] = by_whom.most_common(1)
            holders = [one for one in self._connections.values() if one.who == who]
            most = max(holders, key=lambda one: len(one.unread))
            self._hang_up(most, f"it does not read: {len(most.unread)} bytes of answers wait for it")

    # Going ----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Once a second: who takes too long."""
        assert self._loop is not None
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if self._known(connection.identity):
                connection.since = now
                self._strangers.pop(connection.identity, None)
            else:
                self._strangers.setdefault(connection.identity, connection)
            if not connection.zmtp.ready and now - connection.since > HANDSHAKE_S:
                self._hang_up(connection, f"no handshake within {HANDSHAKE_S:g} s")
            elif now - connection.since > STRANGER_S:
                self._hang_up(connection, f"no session within {STRANGER_S:g} s")
            elif connection.message_since and now - connection.message_since > MESSAGE_S and not connection.queued:
                self._hang_up(connection, f"a message has not ended within {MESSAGE_S:g} s")
            elif connection.unread and now - connection.unread_since > UNREAD_S:
                self._hang_up(connection, f"it has read nothing for {UNREAD_S:g} s")

    def _hang_up(self, connection: DoorConnection, why: str) -> None:
        if not connection.closed:
            self._hung_up_on += 1
            self._end(connection)
            self._log("client_hung_up_on", connection.who, reason=why)

    def _log(self, event: str, who: str, **more: object) -> None:
        """Last of all: a log that cannot be written stops nothing."""
        unlogged = self._log_limit.admit(time.monotonic(), who)
        if unlogged is not None:
            log.warning(event, who=who, unlogged=unlogged, **more)

    def _end(self, connection: DoorConnection) -> None:
        if not connection.closed:
            self._drop(connection)
            assert self._loop is not None
            self._loop.call_soon(self._on_hang_up, connection.identity)

    def _drop(self, connection: DoorConnection) -> None:
        connection.closed = True
        connection.unread.clear()
        if self._loop is not None:
            self._ignore(connection)
            self._loop.remove_writer(connection.socket)
        self._connections.pop(connection.identity, None)
        self._strangers.pop(connection.identity, None)
        connection.socket.close()

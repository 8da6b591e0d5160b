"""The agent's link to its server: one thread that connects, listens, reports, and connects again.

The server's death is seen on the fd server's connection (the kernel hangs up), its silence by
heartbeats. Other threads only append to queues; what they report is coalesced into one message.

The engine's thread may hold the interpreter for milliseconds, and the link's thread then runs too late. So the engine's
thread sends its own messages, and handles those that have come (:meth:`Link.pump`), unless the link's thread is at it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
import zmq

from layerflow.agent.handshake import Handshake, dial, fetch_arena
from layerflow.errors import ConfigError, LayerflowError, ServerLost, SessionError
from layerflow.spec import ModelSpec
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.system.unix_sockets import has_died, is_here, peer_pidfd
from layerflow.wire import codec
from layerflow.wire.client_connection import ClientConnection
from layerflow.wire.messages import (
    QUIET,
    Attach,
    Beat,
    Closed,
    Failure,
    Fence,
    Figures,
    Message,
    Moved,
    Progress,
    Report,
    Terms,
    ToClient,
    Welcome,
)

# What the link tells of its server, and to whom.


@dataclass(slots=True)
class Attachment:
    """One life of the link: a server, its arena and that one's name, its terms."""

    session: int
    arena: SharedMemory
    terms: Terms
    welcome: Welcome
    direct: bool
    incarnation: int = 0


class LinkListener(Protocol):
    """What the link tells; all on the link's thread.

    :ivar pinned_bytes: how far the arena is pinned; -1 = it is not pinned at all.
    """

    @property
    def pinned_bytes(self) -> int: ...

    def may_attach(self) -> bool:
        """Is it a good moment? If not, the link asks again soon."""
        ...

    def supports_direct(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        ...

    def connection_made(self, attachment: Attachment) -> None:
        """A server has taken this agent; steps may be opened."""
        ...

    def lost(self, reason: str) -> None:
        """The server is gone; nothing of it answers any more."""
        ...

    def server_exit_known(self, dead: bool) -> None:
        """Has its process ended, for certain? Told a moment after :meth:`lost`."""
        ...

    def waiting(self, now: float) -> None:
        """Time passed without a server."""
        ...

    def message_received(self, message: ToClient) -> None:
        """A message."""
        ...

    def progress(self) -> list[Progress]:
        """Open steps that moved on since the last report."""
        ...

    def has_moved(self) -> bool:
        """Is there any?"""
        ...

    def tick(self, now: float, silent: bool) -> None:
        """Time passed. `silent`: the server is there but has not answered heartbeats for its ``liveness_ms``."""
        ...

    def sampling(self) -> bool:
        """Is :meth:`progress` or :meth:`tick` to be called within a millisecond?"""
        ...


# What the next report to the server will carry; any thread may append to it.


REPORT_ITEMS = 4096
"""Of one kind in one report; the server takes no report of any length."""

T = TypeVar("T")


@dataclass(slots=True)
class ReportBuffer:
    """What the next report will carry. Each attachment has its own: another server's batches bear the same numbers."""

    done: deque[int] = field(default_factory=deque)
    failed: deque[Failure] = field(default_factory=deque)
    fenced: deque[Fence] = field(default_factory=deque)
    closed: deque[Closed] = field(default_factory=deque)
    figures: deque[Figures] = field(default_factory=deque)
    moved: deque[Moved] = field(default_factory=deque)

    def take(self, progress: Callable[[], list[Progress]]) -> Report | None:
        """The next report; None = there is nothing to tell.

        :param progress: open steps that moved on. Asked behind the batches' ends and before the steps', so that a
            step's end is not told before its layers.
        """
        done, failed, fenced = _drain(self.done), _drain(self.failed), _drain(self.fenced)
        moved_on = progress()
        closed, measured, moved = _drain(self.closed), _drain(self.figures), _drain(self.moved)
        if not (done or failed or fenced or moved_on or closed or measured or moved):
            return None
        return Report(done, failed, fenced, moved_on, closed, measured, moved)


def _drain(column: deque[T]) -> list[T]:
    out: list[T] = []
    while column and len(out) < REPORT_ITEMS:
        out.append(column.popleft())
    return out


CONNECT_TIMEOUT_S = 1.0
DYING_S = 0.5
"""The kernel closes a dying process's connections a moment before it reports the death: so long that is waited for."""
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)
FRONTIER_SAMPLE_MS = 1
LAST_WORDS_MS = 2

log = structlog.get_logger("layerflow.agent")


class Link:
    """Runs from :meth:`start` to :meth:`close`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, engine: str, spec: ModelSpec, name: str = ""
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._engine = engine
        self._name = name
        self._spec = spec
        self._listener: LinkListener
        self.report = ReportBuffer()
        self._outbox: deque[bytes] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._closing = False
        self._tries = 0
        # The thread that holds this lock may use the socket and call the listener.
        self._turn = threading.Lock()
        self._dealer: zmq.Socket[bytes] | None = None
        self._protocol: ClientConnection  # of the dealer
        self._broken: Exception | None = None
        self.ready = threading.Event()
        self._thread = OwnedThread("layerflow-link", self._run, restart_s=RETRY_S[0])

    def start(self, listener: LinkListener) -> None:
        """Begin connecting, and tell `listener`."""
        self._listener = listener
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message, or queue it and wake the thread.

        Encoded here: what cannot be encoded is its sender's error, not the end of the link.
        """
        self._outbox.append(codec.encode_request(message))
        if not self._on_this_thread(self._post):
            self.wake()

    def pump(self) -> None:
        """Handle the messages that have come, on this thread, unless another thread is doing so.

        The caller holds no lock.
        """
        if self._on_this_thread(self._read) and self._listener.sampling():
            self.wake()  # its thread may sleep longer than these messages allow

    def flush(self) -> None:
        """Send the report on this thread; wake the link's thread where that uses the socket."""
        if not self._on_this_thread(self._flush):
            self.wake()

    def give_up(self, error: BaseException) -> None:
        """End the attachment, and attach anew: what moves its bytes is broken. Steps that are open are cut off."""
        self._broken = self._broken or SessionError(
            f"this worker's copies are broken, so that it attaches anew: {type(error).__name__}: {error}"
        )
        self.wake()

    def wake(self) -> None:
        """Wake the thread, at most once until it has looked; does nothing after :meth:`close`."""
        if not self._woken and not self._closing:
            self._woken = True
            os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Send what is queued and hang up."""
        self._closing = True
        if self._wakeup_fd >= 0:
            os.eventfd_write(self._wakeup_fd, 1)
        self._thread.join()

    def release(self) -> None:
        """Close the eventfd behind :meth:`wake`, once no lane can call it any more."""
        if self._wakeup_fd >= 0:
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    def _on_this_thread(self, work: Callable[[zmq.Socket[bytes]], None]) -> bool:
        """Use the socket on this thread unless another thread does; False if one does. An error ends the attachment."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            dealer = self._dealer
            if dealer is None or self._closing:
                return False
            work(dealer)
            # ZMQ's descriptor is edge-triggered: a message that arrived while this thread used the socket would not
            # wake the link's thread.
            if _pending(dealer):
                self.wake()
            return True
        except Exception as error:  # noqa: BLE001 - the link's thread raises it again
            self._broken = self._broken or error
            self.wake()
            return True
        finally:
            self._turn.release()

    def _run(self) -> None:
        while not self._closing:
            if not self._listener.may_attach():
                self._sleep(RETRY_S[0])
                continue
            try:
                self._live()
            except (LayerflowError, zmq.ZMQError, OSError) as error:
                level = log.info if self._tries else log.warning
                level("server_away", endpoint=self._endpoint, error=str(error), tries=self._tries)
                if isinstance(error, (ConfigError, zmq.ContextTerminated)):
                    break
            except Exception:
                log.exception("link_broken", endpoint=self._endpoint)
            delay = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
            self._tries += 1
            self._sleep(delay)

    def _sleep(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup_fd, zmq.POLLIN)
        due = time.monotonic() + seconds
        while not self._closing and (left := due - time.monotonic()) > 0:
            if poller.poll(max(1, round(left * 1e3))):
                self._look()
            self._listener.waiting(time.monotonic())

    def _look(self) -> None:
        os.eventfd_read(self._wakeup_fd)
        self._woken = False

    def _live(self) -> None:
        """One attachment, from connect to hang-up.

        :raises LayerflowError: why it ended, or never began.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        dealer = dial(self._context, self._endpoint)
        connection, arena = None, None
        server = -1
        attached = False
        try:
            conversation = Handshake(dealer)
            welcome = conversation.introduce(self._engine, "agent", deadline, self._name)
            if not welcome.fd_server:
                raise ConfigError(f"{self._endpoint}: an engine worker must run on the server's machine; use ipc://")
            direct = bool(welcome.direct) and self._listener.supports_direct(welcome)
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            connection, fd, nbytes = fetch_arena(Path(welcome.fd_server), welcome.token, deadline)
            try:
                arena = SharedMemory.attach(fd, nbytes)
            finally:
                os.close(fd)
            server = _pidfd(connection)
            attached_as = conversation.attach(Attach(self._spec, memory=True, direct=direct), deadline)
            self._outbox.clear()
            self.report = ReportBuffer()
            attached, self._broken = True, None
            attachment = Attachment(welcome.session, arena, attached_as.terms, welcome, direct, attached_as.incarnation)
            self._listener.connection_made(attachment)
            self._tries = 0
            self._protocol, self._dealer = conversation.protocol, dealer
            self.ready.set()
            self._converse(dealer, connection.fileno())
        finally:
            with self._turn:
                self._dealer = None
            self.ready.clear()
            try:
                if attached:
                    reason = "closed" if self._closing else str(self._broken or "the server is gone")
                    self._listener.lost(reason)
                    dead = server >= 0 and not self._closing and has_died(server, DYING_S)
                    self._listener.server_exit_known(dead)
                if connection is not None:
                    # Nothing of this attachment moves any more: the server need not wait for this process to end.
                    with contextlib.suppress(OSError):
                        connection.send(QUIET, socket.MSG_NOSIGNAL)
            finally:
                if server >= 0:
                    os.close(server)
                if connection is not None:
                    connection.close()
                dealer.close()

    def _converse(self, dealer: zmq.Socket[bytes], connection: int) -> None:
        messages = int(dealer.getsockopt(zmq.FD))
        poller = select.poll()
        for descriptor in (messages, connection, self._wakeup_fd):
            poller.register(descriptor, select.POLLIN)
        protocol, sampled = self._protocol, False
        protocol.received(time.monotonic())
        while True:
            with self._turn:
                now = time.monotonic()
                if self._broken is not None:
                    raise self._broken
                if _pending(dealer):  # after a pause of this process: answers have queued up
                    protocol.received(now)
                self._listener.tick(now, silent=protocol.silent_s(now) > 0)
                if now >= protocol.next_beat:
                    protocol.beat_sent(now)
                    sampled = False
                    self._outbox.append(codec.encode(Beat(now, self._listener.pinned_bytes)))
                # Ends of batches are not flushed here: lanes wake this thread when they want a report. Flushing on
                # every sample would send one report per millisecond.
                if not sampled or self._listener.has_moved() or self.report.figures:
                    self._flush(dealer)
                if self._closing:
                    return
                # A message that came while something was sent does not wake the poll below.
                timeout_ms = 0 if _pending(dealer) else max(1, round((protocol.next_beat - now) * 1e3))
                sampling = timeout_ms > 0 and self._listener.sampling()
                if sampling:
                    timeout_ms = FRONTIER_SAMPLE_MS
            ready = dict(poller.poll(timeout_ms))
            sampled = sampling and not ready
            if self._wakeup_fd in ready:
                self._look()
            with self._turn:
                if connection in ready:
                    if dealer.poll(LAST_WORDS_MS):  # how the steps that it drained have ended
                        self._read(dealer)
                    raise ServerLost("the server hung up")
                if messages in ready or not timeout_ms:
                    self._read(dealer)

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._listener.message_received(self._protocol.receive(frame, time.monotonic()))

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        while (report := self.report.take(self._listener.progress)) is not None:
            self._outbox.append(codec.encode_request(report))
        self._post(dealer)

    def _post(self, dealer: zmq.Socket[bytes]) -> None:
        while self._outbox:
            try:
                dealer.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                raise ServerLost("the server has not read for too long") from None
            self._outbox.popleft()


def _pidfd(connection: socket.socket) -> int:
    """Open a pidfd of the server; -1 = its end is never known: it is in another pid namespace, or in this process."""
    if is_here(connection):
        return -1
    try:
        return peer_pidfd(connection)
    except OSError as error:
        log.warning("server_pidfd_unknown", error=str(error), effect="loads end with the connection")
        return -1


def _pending(dealer: zmq.Socket[bytes]) -> bool:
    """Has a message come?"""
    return bool(int(dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

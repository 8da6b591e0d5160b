"""The agent's link to its server: one thread that connects, listens, reports, and connects again.

The server's death is seen on the doorway's connection (the kernel hangs up), its silence by
heartbeats. Other threads only append to queues; what they report is coalesced into one message.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
import zmq

from layerflow.agent.handshake import Conversation, dial, fetch_arena
from layerflow.errors import ConfigError, LayerflowError, ServerLost
from layerflow.memfd import SharedMemory
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire.messages import (
    STRANGER,
    Attach,
    Beat,
    Closed,
    Failure,
    Fence,
    Figures,
    Message,
    Problem,
    Progress,
    Report,
    Terms,
    ToClient,
    Welcome,
)

CONNECT_TIMEOUT_S = 1.0
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)
FRONTIER_SAMPLE_MS = 1
LAST_WORDS_MS = 2

T = TypeVar("T")

log = structlog.get_logger("layerflow.agent")


@dataclass(slots=True)
class Attachment:
    """One life of the link: a server, its arena, its terms."""

    session: int
    arena: SharedMemory
    terms: Terms
    welcome: Welcome
    direct: bool


class Owner(Protocol):
    """What the link tells; all on the link's thread."""

    def may_bypass(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        ...

    def attached_to(self, attachment: Attachment) -> None:
        """A server has taken this agent; steps may be opened."""
        ...

    def lost(self, reason: str) -> None:
        """The server is gone; nothing of it answers any more."""
        ...

    def heard(self, message: ToClient) -> None:
        """A message."""
        ...

    def progress(self) -> list[Progress]:
        """Open steps that moved on since the last report."""
        ...

    def tick(self, now: float, silent: bool) -> None:
        """Time passed. `silent`: the server is there but has not answered heartbeats for its ``liveness_ms``."""
        ...

    def sampling(self) -> bool:
        """Does the server wait for frontiers (a prefetch window is set)?"""
        ...


@dataclass(slots=True)
class News:
    """What the next report will carry. Each attachment has its own: another server's batches bear the same numbers."""

    done: deque[int] = field(default_factory=deque)
    failed: deque[Failure] = field(default_factory=deque)
    fenced: deque[Fence] = field(default_factory=deque)
    closed: deque[Closed] = field(default_factory=deque)
    figures: deque[Figures] = field(default_factory=deque)


class Link:
    """Runs from construction to :meth:`close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        engine: str,
        spec: ModelSpec,
        owner: Owner,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._engine = engine
        self._spec = spec
        self._owner = owner
        self.news = News()
        self._outbox: deque[bytes] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._closing = False
        self._tries = 0
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layerflow-link", daemon=True)

    def start(self) -> None:
        """Begin connecting."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message and wake the thread.

        Encoded here: what cannot be encoded is its sender's error, not the end of the link.
        """
        self._outbox.append(codec.encode(message))
        self.ring()

    def ring(self) -> None:
        """Wake the thread, at most once until it has looked; nobody is woken after :meth:`close`."""
        if not self._rung and not self._closing:
            self._rung = True
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Send what is queued and hang up."""
        self._closing = True
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)
        self._thread.join()

    def release(self) -> None:
        """Give the bell's descriptor back, once no lane can ring it any more."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _run(self) -> None:
        while not self._closing:
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
        poller.register(self._bell, zmq.POLLIN)
        due = time.monotonic() + seconds
        while not self._closing and (left := due - time.monotonic()) > 0:
            if poller.poll(max(1, round(left * 1e3))):
                self._look()

    def _look(self) -> None:
        os.eventfd_read(self._bell)
        self._rung = False

    def _live(self) -> None:
        """One attachment, from connect to hang-up.

        :raises LayerflowError: why it ended, or never began.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        dealer = dial(self._context, self._endpoint)
        guest, arena = None, None
        attached = False
        try:
            conversation = Conversation(dealer)
            welcome = conversation.introduce(self._engine, "agent", deadline)
            if not welcome.doorway:
                raise ConfigError(f"{self._endpoint}: an engine worker must run on the server's machine; use ipc://")
            direct = bool(welcome.direct) and self._owner.may_bypass(welcome)
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            guest, fd, nbytes = fetch_arena(Path(welcome.doorway), welcome.token, deadline)
            try:
                arena = SharedMemory.attach(fd, nbytes)
            finally:
                os.close(fd)
            terms = conversation.attach(Attach(self._spec, memory=True, direct=direct), deadline).terms
            self._outbox.clear()
            self.news = News()
            attached = True
            self._owner.attached_to(Attachment(welcome.session, arena, terms, welcome, direct))
            self._tries = 0
            self.ready.set()
            self._converse(dealer, guest.fileno(), welcome)
        finally:
            self.ready.clear()
            if attached:
                self._owner.lost("closed" if self._closing else "the server is gone")
            if guest is not None:
                guest.close()
            dealer.close()

    def _converse(self, dealer: zmq.Socket[bytes], guest: int, welcome: Welcome) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(guest, zmq.POLLIN | zmq.POLLERR)
        poller.register(self._bell, zmq.POLLIN)
        beat_s, next_beat = welcome.heartbeat_ms / 1e3, time.monotonic()
        heard = next_beat
        while True:
            now = time.monotonic()
            if int(dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # after a pause of this process: answers have queued up
                heard = now
            self._owner.tick(now, silent=now - heard > welcome.liveness_ms / 1e3)
            if now >= next_beat:
                next_beat = now + beat_s
                self._outbox.append(codec.encode(Beat(now)))
            self._flush(dealer)
            if self._closing:
                return
            patience = FRONTIER_SAMPLE_MS if self._owner.sampling() else max(1, round((next_beat - now) * 1e3))
            ready = dict(poller.poll(patience))
            if guest in ready:
                if dealer.poll(LAST_WORDS_MS):  # how the steps that it drained have ended
                    self._read(dealer)
                raise ServerLost("the server hung up")
            if self._bell in ready:
                self._look()
            if dealer in ready:
                heard = time.monotonic()
                self._read(dealer)

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = codec.decode_reply(frame, 64 << 20)
            if isinstance(message, Problem) and message.code == STRANGER:
                raise ServerLost(f"the server does not know this session: {message.message}")
            self._owner.heard(message)

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        report = self._report()
        if report is not None:
            self._outbox.append(codec.encode(report))
        while self._outbox:
            try:
                dealer.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                raise ServerLost("the server has not read for too long") from None
            self._outbox.popleft()

    def _report(self) -> Report | None:
        news = self.news
        done, failed, fenced = _drain(news.done), _drain(news.failed), _drain(news.fenced)
        progress = self._owner.progress()
        closed, measured = _drain(news.closed), _drain(news.figures)
        if not (done or failed or fenced or progress or closed or measured):
            return None
        return Report(done, failed, fenced, progress, closed, measured)


def _drain(column: deque[T]) -> list[T]:
    out: list[T] = []
    while column:
        out.append(column.popleft())
    return out

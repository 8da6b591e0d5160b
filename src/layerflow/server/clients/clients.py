"""Clients that come, connect at the fd server, fall silent and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from layerflow._version import __version__
from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError
from layerflow.server import behind
from layerflow.server.clients.sessions import LOCAL, Address, ClientSession, Sessions
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message
from layerflow.wire.rights import HERE, Rights

LAST_WORDS_S = 0.25
"""How long the last messages of a client without memory may come after it has hung up."""

IDLE_S = 600.0
"""A client without memory holds nothing but leases, which expire by themselves; it may be quiet for long."""

ATTACH_S = 6.0
"""How long a client that was given the arena may take to attach."""

MAX_GREETED = 1024
"""Clients that greeted and never said hello; past this the first of them is forgotten and must greet again."""


class Clients:
    """Who may talk to the server.

    :param fd_server_path: where clients of this machine fetch shared memory.
    :param send: queue a message for a session.
    :param send_greeting: answer a client's greeting with the server's.
    :param lose: give a session up, for this reason.
    :param suspect: told of a session that has hung up and whose process lives: nothing more is heard of it.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        sessions: Sessions,
        fd_server_path: Path,
        send: Callable[[ClientSession, Message], None],
        send_greeting: Callable[[Address], object],
        lose: Callable[[ClientSession, str], None],
        suspect: Callable[[ClientSession], None],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._fd_server_path = fd_server_path
        self._send = send
        self._send_greeting = send_greeting
        self._lose_session = lose
        self._suspect = suspect
        self._greeted: dict[Address, None] = {}  # oldest first
        self._log = structlog.get_logger("layerflow.server")

    def greet(self, address: Address, frame: bytes) -> None:
        """A client's first frame.

        :raises ProtocolError: it is no greeting, or that of another protocol.
        """
        if frame[:4] == codec.MAGIC:
            # Both ends compare: the client learns of a mismatch even where this end would not mind.
            self._send_greeting(address)
        codec.check_greeting(frame)
        if len(self._greeted) >= MAX_GREETED:
            del self._greeted[next(iter(self._greeted))]
        self._greeted[address] = None

    def greeted(self, address: Address) -> bool:
        """Has this client greeted, and not said hello yet?"""
        return address in self._greeted

    def take_greeting(self, address: Address) -> None:
        """This client has introduced itself as something else than a client."""
        self._greeted.pop(address, None)

    def hello(self, address: Address, message: wire.ToServer, rights: Rights = HERE) -> None:
        """A client's first message: it has a session from now on, and is told what it needs to know.

        :raises ProtocolError: it is another message, it may not say this, or there is no room for more clients.
        """
        if not isinstance(message, wire.Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello; introduce yourself first")
        rights.check(message)
        self._greeted.pop(address, None)
        self._make_room_for_client()
        session = self._sessions.open(
            address, message.engine, message.client, message.pid, time.monotonic(), rights, name=message.name
        )
        settings = self._settings()
        server = settings.server
        fd_server = str(self._fd_server_path) if address[0] == LOCAL else ""
        self._send(
            session,
            wire.Welcome(
                session.number,
                __version__,
                fd_server,
                session.token,
                server.heartbeat_ms,
                server.liveness_ms,
                settings.pool.lease_ms,
                behind.direct_options(settings) if address[0] == LOCAL else "",
            ),
        )

    def _make_room_for_client(self) -> None:
        """Past ``server.max_clients`` the client without memory that was silent longest is forgotten.

        :raises ProtocolError: all of them are connected at the fd server.
        """
        connections = [session for session in self._sessions if not session.entered]
        most = self._settings().server.max_clients
        if len(connections) < most:
            return
        idle = min((s for s in connections if not s.at_fd_server), key=lambda s: s.heard, default=None)
        if idle is None:
            raise ProtocolError(f"server.max_clients = {most} clients without memory are connected; close some")
        self._lose_session(idle, "too_many")

    def entered(self, token: bytes, wanted: bytes) -> bool:
        """A client asks at the fd server for shared memory; whether it may have it.

        :param token: of its session's Welcome.
        :param wanted: which memory: ``WANT_ARENA`` or ``WANT_PRESENCE`` of :mod:`layerflow.wire.messages`.
        """
        session = self._sessions.holding(token)
        if session is None or session.at_fd_server or session.address[0] != LOCAL:
            return False
        if wanted == wire.WANT_ARENA:
            most = self._settings().server.max_sessions
            if sum(other.entered for other in self._sessions) >= most:
                told = f"server.max_sessions = {most} engine workers have the arena"
                self._send(session, wire.Problem(-1, "too_many", told))
                return False
            session.entered, session.entered_at = True, time.monotonic()
        session.at_fd_server = True
        return True

    def may_stay(self, token: bytes) -> str:
        """Why a client that is connected at the fd server is to be hung up on; "" = it is not."""
        session = self._sessions.holding(token)
        if session is None:
            return "no_session"
        if session.entered and session.spec is None and time.monotonic() - session.entered_at > ATTACH_S:
            return "not_attached"
        return ""

    def disconnected(self, session: ClientSession) -> None:
        """Its connection to the control socket has ended. A process that has the arena may still write to it."""
        if session.entered:
            session.silent = True
            self._log.info("session_disconnected", session=session.number, engine=session.name, pid=session.pid)
        else:
            self._lose_session(session, "hung_up")

    def hung_up(self, token: bytes) -> None:
        """Its process lives, and may write to what it has mapped: what it has reserved and pinned stays."""
        session = self._sessions.holding(token)
        if session is not None:
            session.silent = True
            self._log.warning("session_hung_up", session=session.number, engine=session.name, pid=session.pid)
            self._suspect(session)

    def gone(self, token: bytes, why: str) -> None:
        """Its connection at the fd server has ended, and with it what of its process could touch memory."""
        session = self._sessions.holding(token)
        if session is None:
            return
        if session.entered:
            self._lose_session(session, why)
        else:
            # It holds nothing that must be taken back at once, and what it said last may still be under way.
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._lose, token)

    def _lose(self, token: bytes) -> None:
        session = self._sessions.holding(token)
        if session is not None:
            self._lose_session(session, "hung_up")

    def lose_silent(self, session: ClientSession) -> None:
        """Heartbeats stopped. Only a client that cannot write to the arena is given up for it."""
        if session.memory or session.entered:
            if not session.silent:
                session.silent = True
                self._log.warning("session_silent", session=session.number, engine=session.name, pid=session.pid)
        elif not session.at_fd_server and time.monotonic() - session.heard > IDLE_S:
            self._lose_session(session, "idle")

"""Who is attached: clients and reading servers that come, fall silent and go, and what each may do."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from layerflow._version import __version__
from layerflow.boxes import Replica
from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError, VersionMismatch
from layerflow.expiring import ExpiringSet
from layerflow.keys import covered_by
from layerflow.server import terms
from layerflow.server.account import Account, Accounts
from layerflow.server.transport.fd_server import TOKEN_BYTES
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message
from layerflow.wire.peer_link import reader_name_of
from layerflow.wire.rights import HERE, Rights

# Who is attached, by the address on the control socket, and what each may do.


LOCAL, REMOTE = "local", "tcp"
Address = tuple[str, bytes]
"""Which socket (:data:`LOCAL` or :data:`REMOTE`) and the client's identity on it."""


@dataclass(slots=True)
class SessionFigures:
    """What one client has moved and asked since it said hello; times in seconds.

    :param steps: of which nothing is left to do.
    :param loading_steps: those whose loads were measured.
    :param load_seconds: in which the batches of their loads were moving.
    :param exposed_load_seconds: in which the engine stood still for them.
    :param hit_tokens: of its lookups' tokens, those that could be loaded.
    """

    steps: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    loading_steps: int = 0
    load_seconds: float = 0.0
    exposed_load_seconds: float = 0.0
    lookup_tokens: int = 0
    hit_tokens: int = 0


class EngineNames:
    """What engines are called: a name that people know again, though an engine's identity may be new at each start.

    Where several engines ask for one name, the first is called so and the others ``name#2``, ``name#3``. A name is free
    once its engine has no session left, so there are never more names than engines at once.
    """

    def __init__(self) -> None:
        self._engine_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}

    def take(self, engine: str, wanted: str) -> str:
        """The name of this engine, from its first session on."""
        name = self._name_of.get(engine)
        if name is None:
            name, number = wanted, 1
            while name in self._engine_of:
                number += 1
                name = f"{wanted}#{number}"
            self._name_of[engine], self._engine_of[name] = name, engine
        return name

    def leave(self, engine: str) -> None:
        """The engine's last session has ended."""
        del self._engine_of[self._name_of.pop(engine)]


def principal_of(rights: Rights, pid: int) -> str:
    """Whose a client is, with all the others of the same key; of this machine: of the same process.

    :param pid: as the client says. It counts where nothing else tells: in its own container it may be 1, as in others.
    """
    return rights.key or f"pid {rights.process or pid}"


@dataclass(slots=True, eq=False, kw_only=True)
class BaseSession:
    """Whoever has said hello on a control socket.

    :param name: what it is called in status and logs.
    :param rights: what it may do.
    :param account: what it makes the server keep.
    :param heard_at: when it last said anything, monotonic seconds.
    :param silent: it missed its heartbeats.
    """

    number: int
    address: Address
    name: str
    pid: int
    rights: Rights
    account: Account
    heard_at: float
    silent: bool = False

    @property
    def principal(self) -> str:
        """Whose it is; see :func:`principal_of`."""
        return principal_of(self.rights, self.pid)

    @property
    def stake(self) -> tuple[bool, bool]:
        """What ends with it: something that is kept for it, such as a hand-off or a lease; what an engine looks up."""
        return self.account.entries > 0, False


@dataclass(slots=True, eq=False, kw_only=True)
class Reader(BaseSession):
    """A server that reads from this one's arena.

    :param leases: numbers of those that it holds.
    :param lookups: how many it has asked.
    :param link_name: names it on the link over which it reads.
    :param version: of layerflow, as it says; "" = it was not told.
    """

    leases: set[int] = field(default_factory=set)
    lookups: int = 0
    version: str = ""
    link_name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.link_name = reader_name_of(self.principal)


@dataclass(slots=True, eq=False, kw_only=True)
class ClientSession(BaseSession):
    """One client: an engine worker (with `memory`) or one that only looks things up.

    An engine worker that is silent still owns what it may write to; only the fd server says that it cannot write any
    more.

    :param engine: the identity it has given itself, or one of its own; see :meth:`Rights.name_of`.
    :param name: what its engine is called in status, logs and metrics; see :class:`EngineNames`.
    :param token: what it names itself by at the fd server.
    :param at_fd_server: it is connected there, so the death of its process will be seen.
    :param entered: it was given the arena there.
    :param entered_at: when, monotonic seconds.
    :param direct: it moves bytes past the arena.
    :param open_steps: by number, the bytes that each of its unfinished steps asked to be moved.
    :param hit_leases: by request, when the lease of its last hit runs out (monotonic seconds).
    :param resets: how often its engine's weights were replaced.
    :param pinned: how many bytes of the arena it has pinned for its device; -1 = it has none to pin them for.
    :param version: of layerflow, as it says; "" = it was not told.
    """

    token: bytes
    engine: str
    client: str
    spec: ModelSpec | None = None
    memory: bool = False
    direct: bool = False
    at_fd_server: bool = False
    entered: bool = False
    entered_at: float = 0.0
    open_steps: dict[int, int] = field(default_factory=dict)
    hit_leases: dict[str, float] = field(default_factory=dict)
    resets: int = 0
    pinned: int = -1
    version: str = ""
    figures: SessionFigures = field(default_factory=SessionFigures)

    @property
    def labels(self) -> tuple[str, str]:
        """The session's engine and model, for metrics."""
        return self.name, self.spec.name if self.spec is not None else ""

    @property
    def stake(self) -> tuple[bool, bool]:
        """As of every session."""
        return self.account.entries > 0, self.spec is not None


AnySession = ClientSession | Reader
"""What a client may be: :data:`layerflow.wire.rights.Role` says which messages each kind may send."""
Some = TypeVar("Some", bound=BaseSession)


def first_to_go(sessions: Sequence[Some], comer: str) -> Some | None:
    """Who of these makes room for one more of the principal `comer`, so that who opens many costs nobody else's.

    One of the principal that has most of them, the new one counted: those with the least :attr:`~BaseSession.stake`
    first, and of these the one that was silent longest. None = there is nobody but the new one.
    """
    counts = Counter(session.principal for session in sessions)
    counts[comer] += 1
    most = max(counts.values())
    own = [session for session in sessions if session.principal == comer] if counts[comer] == most else []
    crowd = own or [session for session in sessions if counts[session.principal] == most]
    return min(crowd, key=lambda session: (session.stake, session.heard_at), default=None)


class Sessions:
    """All sessions: those of clients, found by number, address or token, and those of reading servers, by address."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self._numbers = ascending()
        self._by_number: dict[int, ClientSession] = {}
        self._by_address: dict[Address, AnySession] = {}
        self._by_token: dict[bytes, ClientSession] = {}
        self._names = EngineNames()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._by_number.values()))

    def open(
        self,
        address: Address,
        engine: str,
        client: str,
        pid: int,
        now: float,
        *,
        rights: Rights = HERE,
        name: str = "",
        version: str = "",
    ) -> ClientSession:
        """A new session for a client that has none.

        :param name: what its engine would be called; "" = as it is identified.
        :param version: see :class:`ClientSession`.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        account = self.accounts.of(address, principal_of(rights, pid))
        known = rights.name_of(engine)
        called = known if not name else name if rights.acts_for(engine) else f"{name}@{rights.key[:8]}"
        session = ClientSession(
            number=next(self._numbers),
            address=address,
            token=token,
            engine=known,
            name=self._names.take(known, called),
            client=client,
            pid=pid,
            version=version,
            rights=rights,
            account=account,
            heard_at=now,
        )
        self._by_number[session.number] = session
        self._by_address[address] = session
        self._by_token[token] = session
        return session

    def open_reader(  # noqa: PLR0917 - what a PeerHello says
        self, address: Address, name: str, pid: int, now: float, rights: Rights, version: str = ""
    ) -> Reader:
        """Open a session for a server that reads here."""
        reader = Reader(
            number=next(self._numbers),
            address=address,
            name=name,
            pid=pid,
            version=version,
            rights=rights,
            account=self.accounts.of(address, principal_of(rights, pid)),
            heard_at=now,
        )
        self._by_address[address] = reader
        return reader

    def close(self, session: AnySession) -> None:
        """Forget a session; what was kept for it ends."""
        del self._by_address[session.address]
        if isinstance(session, ClientSession):
            del self._by_number[session.number]
            del self._by_token[session.token]
            if not self.has_engine(session.engine):
                self._names.leave(session.engine)
        self.accounts.close(session.address)

    def all(self) -> list[AnySession]:
        """Return the sessions of every kind."""
        return list(self._by_address.values())

    def readers(self) -> list[Reader]:
        """Return the servers that read here."""
        return [session for session in self._by_address.values() if isinstance(session, Reader)]

    def has_engine(self, engine: str) -> bool:
        """Is any client of this engine connected?"""
        return any(session.engine == engine for session in self._by_number.values())

    def get(self, number: int) -> ClientSession | None:
        """Return the client of this number."""
        return self._by_number.get(number)

    def at(self, address: Address) -> AnySession | None:
        """Return whoever has said hello from this address."""
        return self._by_address.get(address)

    def holding(self, token: bytes) -> ClientSession | None:
        """Return the client of this token."""
        return self._by_token.get(token)

    def workers_of(self, engine: str) -> list[ClientSession]:
        """Engine workers of one serving engine."""
        return [session for session in self._by_number.values() if session.memory and session.engine == engine]

    def replicas_of(self, session: ClientSession) -> list[Replica]:
        """Per group, which of its engine's workers here that hold the same heads a worker is."""
        assert session.spec is not None
        own = session.spec.shard
        replicas = [own.copy_of(group) for group in range(len(session.spec.groups))]
        if any(replica.copies > 1 for replica in replicas):
            specs = [worker.spec for worker in self.workers_of(session.engine)]
            shards = sorted({spec.shard for spec in specs if spec is not None}, key=lambda shard: shard.tp_rank)
            for group, replica in enumerate(replicas):
                if replica.copies > 1:
                    equal = [shard for shard in shards if covered_by(group, shard) == covered_by(group, own)]
                    replicas[group] = Replica(equal.index(own), len(equal))
        return replicas

    def bound_to_size(self) -> dict[str, int]:
        """By kind, how many cache groups of the models that run here only workers of their own tensor size read."""
        models = {worker.spec.fingerprint: worker.spec for worker in self if worker.memory and worker.spec is not None}
        return Counter(spec.groups[number].kind for spec in models.values() for number in spec.bound_to_size())

    def workers(self) -> int:
        """Attached engine workers."""
        return sum(session.memory for session in self._by_number.values())


LAST_WORDS_S = 0.25
"""How long the last messages of a client without memory may come after it has hung up."""

IDLE_S = 600.0
"""A client without memory holds nothing but leases, which expire by themselves; it may be quiet for long."""

ATTACH_S = 6.0
"""How long a client that was given the arena may take to attach."""

MAX_GREETED = 1024
"""Clients that greeted and never said hello; past this the first of them is forgotten and must greet again."""


class Clients:
    """Those that may talk to the server.

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
        *,
        send: Callable[[ClientSession, Message], None],
        send_raw: Callable[[Address, bytes], object],
        lose: Callable[[AnySession, str], None],
        suspect: Callable[[ClientSession], None],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._fd_server_path = fd_server_path
        self._send = send
        self._send_raw = send_raw
        self._lose_session = lose
        self._suspect = suspect
        self._greeted: ExpiringSet[Address] = ExpiringSet(MAX_GREETED)
        self._log = structlog.get_logger("layerflow.server")

    def greet(self, address: Address, frame: bytes) -> None:
        """A client's first frame.

        :raises ProtocolError: it is no greeting, or that of another protocol.
        """
        try:
            version = codec.check_greeting(frame)
        except VersionMismatch:
            # Both ends compare: the client learns of it, and may speak this end's version.
            self._send_raw(address, codec.greeting())
            raise
        self._send_raw(address, codec.greeting(version))
        self._greeted.add(address)

    def greeted(self, address: Address) -> bool:
        """Return whether this client has greeted and not said hello yet."""
        return address in self._greeted

    def take_greeting(self, address: Address) -> None:
        """This client has introduced itself as something else than a client."""
        self._greeted.discard(address)

    def hello(self, address: Address, message: wire.ToServer, rights: Rights = HERE) -> None:
        """A client's first message: it has a session from now on, and is told what it needs to know.

        :raises ProtocolError: it is another message, it may not say this, or there is no room for more clients.
        """
        if not isinstance(message, wire.Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello; introduce yourself first")
        rights.check(message)
        self._greeted.discard(address)
        self._make_room_for_client(principal_of(rights, message.pid))
        session = self._sessions.open(
            address,
            message.engine,
            message.client,
            message.pid,
            time.monotonic(),
            rights=rights,
            name=message.name,
            version=message.version,
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
                terms.direct_options(settings) if address[0] == LOCAL else "",
            ),
        )

    def _make_room_for_client(self, comer: str) -> None:
        """Past ``server.max_clients`` a client without memory is forgotten, and told so: see :func:`first_to_go`.

        :param comer: the principal of the new one.
        :raises ProtocolError: all of them are connected at the fd server.
        """
        connections = [session for session in self._sessions if not session.entered]
        most = self._settings().server.max_clients
        if len(connections) < most:
            return
        gone = first_to_go([session for session in connections if not session.at_fd_server], comer)
        if gone is None:
            raise ProtocolError(f"server.max_clients = {most} clients without memory are connected; close some")
        told = (
            f"server.max_clients = {most} clients without memory are connected, and another one has come: of the key "
            "or process with most of them the one that was silent longest makes room; close some"
        )
        self._send(gone, wire.Problem(-1, "too_many", told))
        self._lose_session(gone, "too_many")

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

    def disconnected(self, session: AnySession) -> None:
        """A connection to the control socket has ended. A process that has the arena may still write to it."""
        if isinstance(session, ClientSession) and session.entered:
            session.silent = True
            self._log.info("session_disconnected", session=session.number, engine=session.name, pid=session.pid)
        else:
            self._lose_session(session, "hung_up")

    def hung_up(self, token: bytes) -> None:
        """A client's process lives, and may write to what it has mapped: what it has reserved and pinned stays."""
        session = self._sessions.holding(token)
        if session is not None:
            session.silent = True
            self._log.warning("session_hung_up", session=session.number, engine=session.name, pid=session.pid)
            self._suspect(session)

    def gone(self, token: bytes, why: str) -> None:
        """A client's connection at the fd server has ended, and with it what of its process could touch memory."""
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

    def lose_silent(self, session: AnySession) -> None:
        """Heartbeats stopped. Only a client that cannot write to the arena is given up for it."""
        if isinstance(session, Reader):
            self._lose_session(session, "silent")
        elif session.memory or session.entered:
            if not session.silent:
                session.silent = True
                self._log.warning("session_silent", session=session.number, engine=session.name, pid=session.pid)
        elif not session.at_fd_server and time.monotonic() - session.heard_at > IDLE_S:
            self._lose_session(session, "idle")

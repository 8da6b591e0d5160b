"""Who is attached: clients by their address on the control socket, and what each may do."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from layerflow.boxes import Replica
from layerflow.keys import covered_by
from layerflow.server.clients.account import Account, Accounts
from layerflow.server.transport.fd_server import TOKEN_BYTES
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire.rights import HERE, Rights

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


@dataclass(slots=True)
class ClientSession:
    """One client: an engine worker (with `memory`) or one that only looks things up.

    :param engine: the identity it has given itself, or one of its own; see :meth:`Rights.name_of`.
    :param name: what its engine is called in status, logs and metrics; see :class:`EngineNames`.
    :param rights: what it may do.
    :param account: what it makes the server keep.
    :param heard: when it last said anything, monotonic seconds.
    :param token: what it names itself by at the fd server.
    :param at_fd_server: it is connected there, so the death of its process will be seen.
    :param entered: it was given the arena there.
    :param entered_at: when, monotonic seconds.
    :param direct: it moves bytes past the arena.
    :param open_steps: by number, the bytes that each of its unfinished steps asked to be moved.
    :param leases: by request, when the lease of its last hit runs out (monotonic seconds).
    :param silent: it missed its heartbeats. An engine worker that is silent still owns what it may write
        to; only the fd server says that it cannot write any more.
    :param resets: how often its engine's weights were replaced.
    :param pinned: how many bytes of the arena it has pinned for its device; -1 = it has none to pin them for.
    """

    number: int
    address: Address
    token: bytes
    engine: str
    name: str
    client: str
    pid: int
    rights: Rights
    account: Account
    heard: float
    spec: ModelSpec | None = None
    memory: bool = False
    direct: bool = False
    at_fd_server: bool = False
    entered: bool = False
    entered_at: float = 0.0
    silent: bool = False
    open_steps: dict[int, int] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    resets: int = 0
    pinned: int = -1
    figures: SessionFigures = field(default_factory=SessionFigures)

    @property
    def labels(self) -> tuple[str, str]:
        """Its engine and model, for metrics."""
        return self.name, self.spec.name if self.spec is not None else ""


class Sessions:
    """All sessions, found by number, address or token."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self._numbers = ascending()
        self._by_number: dict[int, ClientSession] = {}
        self._by_address: dict[Address, ClientSession] = {}
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
        rights: Rights = HERE,
        *,
        name: str = "",
    ) -> ClientSession:
        """A new session for a client that has none.

        :param name: what its engine would be called; "" = as it is identified.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        account = self.accounts.of(address)
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
            rights=rights,
            account=account,
            heard=now,
        )
        self._by_number[session.number] = session
        self._by_address[address] = session
        self._by_token[token] = session
        return session

    def close(self, session: ClientSession) -> None:
        """Forget it; what was kept for it ends."""
        del self._by_number[session.number]
        del self._by_address[session.address]
        del self._by_token[session.token]
        self.accounts.close(session.address)
        if not self.has_engine(session.engine):
            self._names.leave(session.engine)

    def has_engine(self, engine: str) -> bool:
        """Is any client of this engine connected?"""
        return any(session.engine == engine for session in self._by_number.values())

    def get(self, number: int) -> ClientSession | None:
        """By number."""
        return self._by_number.get(number)

    def at(self, address: Address) -> ClientSession | None:
        """By address."""
        return self._by_address.get(address)

    def holding(self, token: bytes) -> ClientSession | None:
        """By token."""
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

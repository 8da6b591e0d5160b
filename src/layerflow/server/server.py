"""The server: one process (or thread), one asyncio loop. It decides; agents move the bytes."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import structlog
import zmq

from layerflow.config.settings import Settings, format_size, live_changes, make_private, make_private_directory
from layerflow.errors import ConfigError, DeadlineExceeded, ProtocolError, VersionMismatch
from layerflow.findings import Severity, arena_fits
from layerflow.flow.commands import StepDone
from layerflow.flow.events import Event, Limits, LimitsChanged
from layerflow.observe.metrics import Metrics
from layerflow.observe.slow_steps import SlowSteps
from layerflow.pool.arena import Arena, Warmer
from layerflow.pool.covering import CoveringPool
from layerflow.presence import PresenceWriter
from layerflow.recording.notes import Note
from layerflow.server import terms
from layerflow.server.account import Accounts, Allowance
from layerflow.server.chunk_journal import ABSENT, ARENA, TIER, ChunkJournal
from layerflow.server.clients import LOCAL, REMOTE, Address, AnySession, Clients, ClientSession, Sessions
from layerflow.server.driver import Driver
from layerflow.server.handlers import Handlers
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.leases import Leases
from layerflow.server.mailboxes import Mailboxes
from layerflow.server.plans import PinnedHits
from layerflow.server.recorder import Recorder, server_sample, session_note, settings_in_force
from layerflow.server.spans import SpanQuestions, talking_workers
from layerflow.server.status import status_of
from layerflow.server.terms import limits_of, terms_of
from layerflow.server.transport.door import Door
from layerflow.server.transport.fd_server import NO_ROOM, FdServer, SharedRegion
from layerflow.server.transport.router import Router
from layerflow.server.transport.security import Curve, open_curve
from layerflow.server.trial import Trials
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import STRANGER, VERSION, Message
from layerflow.wire.rights import HERE, NotAllowed, Rights
from layerflow.wire.zmtp import Mechanism, Null

if TYPE_CHECKING:
    from layerflow.server.peers.peers import Peers
    from layerflow.server.tier.tier import Tier
    from layerflow.server.watch import FileState


# The server's slow clock: leases that ran out, peers that fell silent, how late the loop runs.


PERIOD_S = 0.25

log = structlog.get_logger("layerflow.server")


MOST_BEHIND_S = 10.0
"""A lease is kept no longer than so for messages that wait to be read, in seconds: some client may never stop sending.
The control socket reads its clients in turn, so that messages of the others do not wait so long."""


class PausedClock:
    """Until when leases have run out, so that a pause of the server costs nobody a lease.

    What clients sent while the server was stopped may use leases: none runs out before a round that began in time has
    found everything read. After a pause leases run out later by its length.

    :param lease_s: how long leases usually last, in seconds: for so long after a pause it is added.
    """

    def __init__(self, now: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self._caught_up = now
        self._pause = 0.0
        self._pause_counts_until = now

    def expired(self, now: float, lag: float, caught_up: bool) -> float:
        """Leases that ended at or before this time have run out. Monotonic seconds.

        :param lag: how much later than asked this round began.
        :param caught_up: every message that has come is handled.
        """
        if now >= self._pause_counts_until:
            self._pause = 0.0
        if lag >= PERIOD_S:
            self._pause += lag
            self._pause_counts_until = now + self._lease_s
            # What came during the pause may not even have reached the inbox yet.
            self._caught_up = max(self._caught_up, now - lag - PERIOD_S)
            return min(self._caught_up, now - self._pause)
        if caught_up:
            self._caught_up = now
        return min(max(self._caught_up, now - MOST_BEHIND_S), now - self._pause)


async def housekeep(
    server: ServerContext,
    lease_s: float,
    caught_up: Callable[[], bool],
    lose_silent: Callable[[AnySession], None],
) -> None:
    """Run until cancelled. Loop lag is how much later than asked each round begins.

    :param lease_s: how long leases usually last.
    :param caught_up: every message that has come is handled.
    :param lose_silent: told of sessions of which nothing was heard for too long.
    """
    due = time.monotonic() + PERIOD_S
    leases = PausedClock(time.monotonic(), lease_s)
    while True:
        await anyio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        lag = max(0.0, now - due)
        server.metrics.loop_lag(lag)
        due = now + PERIOD_S
        try:
            expired = leases.expired(now, lag, caught_up())
            server.leases.expire(expired)
            server.handoffs.expire(expired)
            server.driver.follows.expire(now)
            if server.sources is not None:
                server.sources.expire(now)
            server.trials.check(now)
            server.sessions.accounts.return_memory()
            _record(server, now, lag)
            # A server that was stopped for a while has not listened: it judges nobody by that time.
            limit = server.settings().liveness_ms / 1e3 + lag
            if server.peers is not None:
                server.peers.expire(expired)
                server.peers.check_liveness()
            for session in server.sessions.all():
                if now - session.heard_at > limit:
                    lose_silent(session)
        except Exception:
            # What is not done in this round is done in the next one, 0.25 s later.
            server.metrics.housekeeping_failed()
            log.exception("housekeeping_failed")


def _record(server: ServerContext, now: float, lag: float) -> None:
    """What a recording wants to know now and then."""
    recorder = server.recorder
    recorder.check(now)
    recorder.ask_workers(talking_workers(server.sessions))
    if recorder.sample_due(now) and recorder.current is not None:
        recorder.current.note(server_sample(server.pool.statistics(), server.driver.flow.statistics(), now, lag))


class Server:
    """Runs once.

    :param settings: see ``docs/configuration.md``.
    :param context: the ZMQ context whose ``inproc://`` endpoints embedded agents use; None = its own.
    :raises ConfigError: see :func:`behind.tier_of`; or the machine can never hold such an arena.
    """

    def __init__(self, settings: Settings, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.settings = settings
        self._file: FileState | None = None
        self.trials = Trials()
        tier = terms.tier_of(settings)
        _check_memory(settings)
        self.metrics = Metrics()
        self.started_at = time.time()
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._arena = Arena(settings.pool.size, settings.pool.hugepages, settings.pool.numa)
        self._warmer = Warmer(self._arena)
        # A table of the arena alone would hide from clients what lies behind it.
        self._presence = PresenceWriter(self._arena.nbytes) if tier is None and not settings.peers.attach else None
        self.pool = CoveringPool(self._arena, self._presence, lease_share=settings.pool.lease_share)
        self._journal = ChunkJournal(self._where, lambda: self.settings.server.max_described_bytes)
        self._looking: Generator[None, None, None] | None = None
        self.pool.listen(self._journal.object_changed)
        self.accounts = Accounts(self._allowance)
        self.sessions = Sessions(self.accounts)
        self.mailboxes = Mailboxes()
        self.driver = Driver(self.pool, self._limits(settings), self.metrics, self._send_number, self._step_done)
        self.handoffs = Handoffs(
            self.pool,
            self.pool.statistics().capacity_bytes,
            lambda: self.settings.pd.handoff_share,
            revoke_reservations=self.driver.follows.revoke_reservations,
            soon=lambda work: asyncio.get_running_loop().call_soon(work),
            changed=self._less_to_do,
        )
        self.driver.handoffs = self.handoffs
        arena, incoming = (self._arena.fd, self._arena.nbytes), self.driver.incoming
        leases = Leases(self.pool, incoming, self.accounts, lambda work: asyncio.get_running_loop().call_soon(work))
        self.driver.let_go = leases.let_go
        self.tier: Tier | None = None
        if tier is not None:
            from layerflow.server.tier.tier import Tier  # noqa: PLC0415 - most servers have none

            name, options = tier
            self.tier = Tier(
                name,
                options,
                settings.pool,
                pool=self.pool,
                arena=arena,
                emit=self._tier_news,
                incoming=incoming,
                changed=self._journal.object_changed,
                turned=self._look_again,
            )
        self.peers: Peers | None = None
        if settings.peers.serve or settings.peers.attach or settings.peers.learn:
            from layerflow.server.peers.peers import Peers  # noqa: PLC0415 - most servers have none

            # The first socket starts libzmq's threads, which end the process where no descriptor is left for them.
            self._context.socket(zmq.DEALER).close()
            self.peers = Peers(
                lambda: self.settings,
                self._context,
                self.pool,
                arena,
                self._arena.view,
                models=lambda: [session.spec for session in self.sessions if session.memory and session.spec],
                send=self._send_to,
                give_up=self._give_up,
                emit=self._tier_news,
                incoming=incoming,
                storing=(self.handoffs, self.driver.follows),
                sessions=self.sessions,
                mailboxes=self.mailboxes,
            )
        sources = None
        if self.tier is not None or (self.peers is not None and self.peers.source is not None):
            from layerflow.server.sources import ObjectSources  # noqa: PLC0415 - most servers have none

            source = self.peers.source if self.peers is not None else None
            sources = self.driver.sources = ObjectSources(settings.pool, self.tier, source)
        questions = SpanQuestions(self._send)
        recorder = Recorder(self._standing, questions, lambda: talking_workers(self.sessions))
        self.recorder = self.driver.recorder = recorder
        self._server_context = ServerContext(
            recorder=self.recorder,
            trials=self.trials,
            span_questions=questions,
            pool=self.pool,
            driver=self.driver,
            sessions=self.sessions,
            metrics=self.metrics,
            slow_steps=SlowSteps(lambda: self.settings.log.slow_step_ms / 1e3),
            send=self._send,
            hang_up=self._hang_up,
            terms=self._terms,
            status=self.status,
            arena_bytes=self._arena.nbytes,
            settings=lambda: self.settings.server,
            journal=self._journal,
            leases=leases,
            handoffs=self.handoffs,
            pd=lambda: self.settings.pd,
            plans=PinnedHits(self.pool, leases, lambda: self.settings.pool.lease_ms / 1e3),
            incarnation=secrets.randbits(62) + 1,
            sources=sources,
            mailboxes=self.mailboxes,
            peers=self.peers,
            direct=bool(terms.direct_options(settings)),
        )
        self._handlers = Handlers(self._server_context)
        self.metrics.limits(self._limits(settings))
        self._doors: dict[str, Door | Router] = {}
        self._clients = Clients(
            lambda: self.settings,
            self.sessions,
            self.fd_server_path,
            send=self._send,
            send_raw=lambda address, frame: self._doors[address[0]].send(address[1], frame),
            lose=self._handlers.lose,
            suspect=lambda session: self.handoffs.lose_engine(session.engine, "a worker of its engine has hung up"),
        )
        self._fd_server: FdServer | None = None
        self._curve: Curve | None = None
        self._idle: anyio.Event | None = None
        self._log = structlog.get_logger("layerflow.server")

    @property
    def healthy(self) -> bool:
        """Taking new work."""
        return bool(self._doors) and not self._server_context.draining

    @property
    def fd_server_path(self) -> Path:
        """Where clients of this machine fetch shared memory."""
        endpoint = self.settings.server.endpoint
        if endpoint.startswith("ipc://"):
            return Path(endpoint.removeprefix("ipc://") + ".arena")
        name = endpoint.removeprefix("inproc://").replace("/", "_")
        return Path(f"/tmp/layerflow-{os.getuid()}") / f"{os.getpid()}-{name}.arena"  # noqa: S108

    async def run(self, shutdown: anyio.Event, started: Callable[[list[str]], None] | None = None) -> None:
        """Serve until `shutdown` is set, then drain: steps may finish within ``server.drain_timeout_s``.

        :param started: told the endpoints once they accept clients.
        :raises ConfigError: an endpoint cannot be used.
        """
        try:
            endpoints = self._open()
            for each in (self.tier, self.peers):
                if each is not None:
                    each.start()
            self.recorder.follow(self.settings.record)
            lease_s = self.settings.pool.lease_ms / 1e3
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    housekeep, self._server_context, lease_s, lambda: self.caught_up, self._clients.lose_silent
                )
                if self.settings.pool.warm:
                    self._warmer.start()
                if started is not None:
                    started(endpoints)
                self._log.info("server_started", endpoints=endpoints, arena_bytes=self._arena.nbytes)
                await shutdown.wait()
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            fenced = True
            with anyio.CancelScope(shield=True):
                for each in (self.tier, self.peers):
                    fenced = (each is None or await each.close()) and fenced
            self._close()
            if not fenced:
                raise DeadlineExceeded(
                    "the host process was killed and does not die; the server has ended, and the arena's memory is free"
                    " when the process ends: look at the system's log for the disk or driver that does not answer"
                )

    def _tier_news(self, events: Sequence[Event]) -> None:
        if events:
            self.driver.handle(*events)

    def _where(self, keys: Sequence[bytes]) -> int:
        """Where all of these objects are, as the journal counts it."""
        tier, resident = self.tier, self.pool.lookup(keys)
        if all(resident):
            return ARENA
        if tier is None:
            return ABSENT
        there = zip(keys, resident, strict=True)
        return TIER if all(here or tier.lists(key) for key, here in there) else ABSENT

    def _look_again(self) -> None:
        """The tier came or went: look at each described chunk, in turns."""
        idle, self._looking = self._looking is None, self._journal.look_again()
        if idle:
            asyncio.get_running_loop().call_soon(self._look_on)

    def _look_on(self) -> None:
        if self._looking is not None and next(self._looking, self) is self:
            self._looking = None
        if self._looking is not None:
            asyncio.get_running_loop().call_soon(self._look_on)

    def _limits(self, settings: Settings) -> Limits:
        return limits_of(settings, self._arena.nbytes)

    def _allowance(self) -> Allowance:
        server = self.settings.server
        return Allowance(server.max_client_bytes, server.max_clients_bytes)

    def apply(self, settings: Settings) -> None:
        """Take new values of the live keys; steps in flight go on under the new limits.

        Whatever they are refused for, nothing has changed.

        :raises ConfigError: keys that need a restart differ.
        """
        changes = live_changes(self.settings, settings)
        # What may fail comes before the first effect: what is applied in part would be in force in part.
        terms, limits = terms_of(settings, self.sessions.workers()), self._limits(settings)
        codec.encode(terms)
        in_force = settings_in_force(settings, time.monotonic())
        self.settings = settings
        if changes:
            # The terms first: lanes keep to the new caps before they are granted anything under them.
            for session in self.sessions:
                if session.spec is not None:
                    self._send(session, terms)
            self.driver.handle(LimitsChanged(limits))
            self.metrics.limits(limits)
            if self.recorder.current is not None:
                self.recorder.current.note(in_force)
            self.recorder.follow(settings.record)
            self._log.info("settings_applied", changes=changes)

    def _standing(self, at: float) -> Iterator[Note]:
        """What a recording begins with."""
        yield settings_in_force(self.settings, at)
        yield at, LimitsChanged(self._limits(self.settings)), ()
        for session in self.sessions:
            if (note := session_note(session, at)) is not None:
                yield note

    def file_changed(self, state: FileState) -> None:
        """Show this state of the watched configuration file in status and metrics; a trial ends with an edit."""
        if self._file is not None and state.sha256 != self._file.sha256:
            # One that changes no live key is not applied, and so ends none before this.
            self.trials.end("the file was edited")
        self._file = state
        self.metrics.config_file(
            state.path, state.sha256, state.applied_at, refused_at=state.refused_at, refusals=state.refusals
        )

    def status(self) -> dict[str, object]:
        """Everything ``layerflow status`` shows, JSON-ready."""
        self.read_statistics()
        found = status_of(self._server_context, self.settings, self.started_at, self._file, healthy=self.healthy)
        doors = {name: asdict(door.statistics()) for name, door in self._doors.items() if isinstance(door, Door)}
        arena = {
            "bytes": self._arena.nbytes,
            "taken_bytes": self._arena.memory.taken_bytes,
            "hugepages": self.settings.pool.hugepages,
        }
        return found | {"memory_node": self._arena.placed, "arena": arena, "doors": doors}

    def metrics_text(self) -> bytes:
        """Prometheus exposition text."""
        self.read_statistics()
        return self.metrics.render()

    def health(self) -> dict[str, object]:
        """What ``/healthz`` says. A tier that is down, or cold memory, is no reason to send work elsewhere."""
        found: dict[str, object] = {"status": "ok"}
        if not self.healthy:
            found = {"status": "draining", "reason": "the server takes no new sessions"}
        if self.tier is not None:
            found["tier"] = {"backend": self.tier.name, "up": self.tier.up, "reason": self.tier.reason}
        found["warm"] = {name: {"bytes": done, "of": total} for name, (done, total) in self.warmth().items()}
        return found

    def warmth(self) -> dict[str, tuple[int, int]]:
        """Memory that is being touched before it is needed: bytes done, and bytes in all."""
        found = {"arena": (self._arena.warm_bytes, self._arena.nbytes)} if self.settings.pool.warm else {}
        if self.tier is not None and (segment := self.tier.segment_warmth()):
            found["segment"] = segment
        return found

    def read_statistics(self) -> None:
        """Bring the metrics up to date with what is counted elsewhere."""
        self.metrics.pool(self.pool.statistics())
        self.metrics.flow(self.driver.flow.statistics())
        follows = self.driver.follows
        self.metrics.recording(self.recorder.statistics())
        self.metrics.trial(on=self.trials.current is not None)
        self.metrics.described(self._journal.statistics())
        self.metrics.handoffs(self.handoffs.statistics(), follows.objects, follows.coming_objects)
        if self.tier is not None:
            self.metrics.tier(self.tier.statistics())
        if self.peers is not None:
            self.metrics.peers(self.peers.statistics())

    @property
    def caught_up(self) -> bool:
        """Every message that has come is handled."""
        return not self._server_context.mailboxes.busy and not any(door.pending() for door in self._doors.values())

    def _open(self) -> list[str]:
        server = self.settings.server
        make_private_directory(server.endpoint)
        make_private(self.fd_server_path.parent)
        rooms = {wire.WANT_ARENA: SharedRegion(self._arena.fd, self._arena.nbytes), wire.WANT_PRESENCE: NO_ROOM}
        if self.pool.presence is not None:
            table = self.pool.presence.memory
            rooms[wire.WANT_PRESENCE] = SharedRegion(table.fd, table.nbytes)
        clients = self._clients
        self._fd_server = FdServer(
            self.fd_server_path,
            rooms,
            on_entered=clients.entered,
            on_gone=clients.gone,
            on_hang_up=clients.hung_up,
            may_stay=clients.may_stay,
        )
        self._fd_server.start()
        local = self._door(LOCAL) if server.endpoint.startswith("ipc://") else self._router(LOCAL)
        self._doors[LOCAL] = local
        local.bind(server.endpoint)
        endpoints = [server.endpoint]
        if server.tcp_endpoint:
            self._curve = open_curve(server)
            remote = self._door(REMOTE, self._curve.mechanism)
            self._doors[REMOTE] = remote
            endpoints.append(remote.bind(server.tcp_endpoint))
        for door in self._doors.values():
            door.start()
        return endpoints

    def _door(self, name: str, mechanism: Callable[[], Mechanism] = Null) -> Door:
        return Door(
            functools.partial(self._hear, name),
            lambda identity: self._hung_up((name, identity)),
            lambda identity: self.sessions.at((name, identity)) is not None,
            self.settings.server.max_message_bytes,
            mechanism,
        )

    def _router(self, name: str) -> Router:
        return Router(self._context, functools.partial(self._hear, name), self.settings.server.max_message_bytes)

    def _close(self) -> None:
        self.recorder.close()
        self.driver.close()
        for door in self._doors.values():
            door.close()
        self._doors.clear()
        if self._own_context:
            self._context.term()
        if self._fd_server is not None:
            # After the last messages have left: a client that is hung up on reads no further.
            self._fd_server.close()
        self._warmer.stop()
        self._arena.close()
        if self._presence is not None:
            self._presence.close()

    async def _drain(self) -> None:
        self._server_context.draining = True
        self._log.info("server_draining", open_steps=self.driver.open_steps)
        self._idle = anyio.Event()
        with anyio.move_on_after(self.settings.server.drain_timeout_s):
            while self.driver.open_steps or self.handoffs.wanted:
                await self._idle.wait()
                self._idle = anyio.Event()
        if self.tier is not None:
            with anyio.move_on_after(self.settings.server.drain_timeout_s):
                await self.tier.drain()
        for session in self.sessions.all():
            self._handlers.lose(session, "shutdown")

    def _hear(self, door: str, identity: bytes, frame: bytes | None) -> None:
        address = (door, identity)
        session = self.sessions.at(address)
        if session is not None:
            session.heard_at = time.monotonic()
            session.silent = False
        try:
            if frame is None:
                raise ProtocolError("a message is one frame, not several")
            if session is not None:
                message = codec.decode_request(frame, self.settings.server.max_message_bytes)
                self._handlers.handle(session, message, len(frame))
            elif self._clients.greeted(address):
                message = codec.decode_request(frame, self.settings.server.max_message_bytes)
                if isinstance(message, wire.PeerHello) and self.peers is not None:
                    self._clients.take_greeting(address)
                    self.peers.hello(address, message, self._rights(address))
                else:
                    self._clients.hello(address, message, self._rights(address))
            else:
                self._clients.greet(address, frame)
        except ProtocolError as error:
            client = isinstance(session, ClientSession)
            known_code = "malformed" if client else STRANGER
            code = VERSION if isinstance(error, VersionMismatch) else known_code
            if isinstance(error, NotAllowed):
                code = error.code
            self.metrics.protocol_error(code)
            unlogged = self._server_context.log_limit.admit(time.monotonic())
            if unlogged is not None:
                self._log.warning("message_refused", code=code, error=str(error), door=door, unlogged=unlogged)
            number = codec.number_of(frame) if client and frame is not None else -1
            self._doors[door].send(identity, codec.encode(wire.Problem(number, code, str(error))))

    def _rights(self, address: Address) -> Rights:
        """What a client may do, by the door and the key it came with.

        :raises ProtocolError: it is gone.
        """
        name, identity = address
        door = self._doors[name]
        if not isinstance(door, Door):
            return HERE
        if name == LOCAL or self._curve is None:
            return replace(HERE, process=door.process_of(identity))
        rights = self._curve.allowed.get(door.key_of(identity))
        if rights is None:
            raise ProtocolError("a client without a key, or one that has left")
        return rights

    def _hung_up(self, address: Address) -> None:
        """A client's connection has ended."""
        self._clients.take_greeting(address)
        session = self.sessions.at(address)
        if session is not None:
            self._server_context.mailboxes.start(session.account, self._disconnect(session), always=True)

    async def _disconnect(self, session: AnySession) -> None:
        """Behind what the client has said before it hung up."""
        self.trials.lost(session.number)
        if self.sessions.at(session.address) is session:
            self._clients.disconnected(session)

    def _send_to(self, address: Address, message: Message) -> bool:
        door = self._doors.get(address[0])
        return door is not None and door.send(address[1], codec.encode(message))

    def _send(self, session: ClientSession, message: Message) -> None:
        name, identity = session.address
        door = self._doors.get(name)
        if door is None or door.send(identity, codec.encode(message)):
            return
        unlogged = self._server_context.log_limit.admit(time.monotonic())
        if unlogged is not None:
            kind = type(message).__name__
            self._log.warning("message_undeliverable", session=session.number, kind=kind, unlogged=unlogged)

    def _hang_up(self, session: AnySession, why: str) -> bool:
        name, identity = session.address
        door = self._doors.get(name)
        if not isinstance(door, Door):
            return False
        door.hang_up(identity, why)
        return True

    def _give_up(self, session: AnySession, why: str) -> None:
        self._handlers.lose(session, why)

    def _send_number(self, number: int, message: Message) -> None:
        session = self.sessions.get(number)
        if session is not None:
            self._send(session, message)

    def _step_done(self, done: StepDone) -> None:
        session = self.sessions.get(done.session)
        if session is not None:
            self.metrics.step_done(session.labels, done.loaded_bytes, done.saved_bytes)
            session.figures.steps += 1
            session.figures.loaded_bytes += done.loaded_bytes
            session.figures.saved_bytes += done.saved_bytes
            session.open_steps.pop(done.step, None)
        self._less_to_do()

    def _less_to_do(self) -> None:
        """Something that a server which is to stop waits for has ended."""
        if self._idle is not None:
            self._idle.set()

    def _terms(self) -> wire.Terms:
        return terms_of(self.settings, self.sessions.workers())


def _check_memory(settings: Settings) -> None:
    """Refuse an arena that this machine can never hold, and say so where it has no room for it now.

    Huge pages are taken when the arena is made, or refused then.

    :raises ConfigError: the arena is larger than the machine's memory, or than the limit of its control group.
    """
    if settings.pool.hugepages:
        return
    finding = arena_fits(settings.pool.size)
    if finding.state is Severity.PROBLEM:
        raise ConfigError(f"pool.size = {format_size(settings.pool.size)}: {finding.found}; {finding.advice}")
    if finding.state is Severity.WARNING:
        log = structlog.get_logger("layerflow.server")
        log.warning("memory_short", found=finding.found, advice=finding.advice)

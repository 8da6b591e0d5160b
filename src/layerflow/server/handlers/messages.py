"""What each message of a client does. Bad ones get a Problem and change nothing."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from layerflow.errors import InvalidTransition, LayerflowError, ProtocolError
from layerflow.flow.events import (
    LayerShape,
    RequestAborted,
    SessionLost,
    SessionOpened,
)
from layerflow.recording.format import LookupsMissed, SessionGone
from layerflow.server.account import OVERDRAFT, Refused
from layerflow.server.clients import AnySession, ClientSession, Reader
from layerflow.server.handlers.chunks import describe_chunks, read_chunks
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.forget import purge, reset_engine
from layerflow.server.handlers.handoffs import end_handoff, keep_part, open_handoff, release_handoff, watch_handoff
from layerflow.server.handlers.lookups import LookupHandler
from layerflow.server.handlers.steps import open_step, report, step_refused, tell
from layerflow.server.leases import is_lease_of, lease_owner
from layerflow.server.mailboxes import in_turns
from layerflow.server.recorder import session_note
from layerflow.server.spans import answer_bytes, kept_bytes, trace_workers
from layerflow.wire import messages as wire
from layerflow.wire.messages import ToServer
from layerflow.wire.rights import NotAllowed

if TYPE_CHECKING:
    from layerflow.server.peers.lending import Lending

MOST_MISSED, MOST_MISSED_TOKENS = 1 << 20, 1 << 40
"""Lookups, and their tokens, that one Missed may tell of: a client sends it every second."""

BUGS = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
"""No message may take the loop, nor its sender's patience: a bug costs that one request."""

ENDING = (wire.Report, wire.DropLease, wire.EndHandoff, wire.ReleaseHandoff, wire.Abort, wire.Bye)
"""What ends something is taken however much a client keeps: it is not said twice. Past an overdraft
(:attr:`layerflow.server.account.Account.overdrawn`) the client is hung up on."""

OVERDRAWN = f"its messages that wait take {OVERDRAFT} times what it may keep"


class Handlers:
    """Dispatches a session's messages."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.get_logger("layerflow.server")
        self._answering: set[asyncio.Task[None]] = set()
        self._windows_due = False
        self._told_window = -1
        self._lookups = LookupHandler(context)

    def handle(self, session: AnySession, message: ToServer, nbytes: int = 0) -> None:
        """Do what the message asks, or answer with a Problem; behind the client's other messages.

        A client that keeps far too much is hung up on instead.

        :param nbytes: of the message.
        """
        if session.account.overdrawn and self._context.hang_up(session, OVERDRAWN):
            return
        if isinstance(session, Reader):
            self._lending.receive(session, message, self._dispatch_reader, nbytes)
            return
        if isinstance(message, wire.Beat):
            session.pinned = message.pinned
            self._context.send(session, message)
            return
        work = self._guarded(session, message)
        try:
            self._context.mailboxes.start(session.account, work, nbytes, always=isinstance(message, ENDING))
        except (NotAllowed, Refused) as error:
            self._refuse(session, message, error.code, error)

    async def _guarded(self, session: ClientSession, message: ToServer) -> None:
        try:
            await self._dispatch(session, message)
        except (NotAllowed, Refused) as error:
            self._refuse(session, message, error.code, error)
        except InvalidTransition as error:
            self._refuse(session, message, "impossible", error)
        except LayerflowError as error:
            self._refuse(session, message, "invalid", error)
        except BUGS as error:
            self._log.exception("message_failed", session=session.number, kind=type(message).__name__)
            self._refuse(session, message, "internal", LayerflowError(f"{type(error).__name__}: {error}"))

    def lose(self, session: AnySession, why: str) -> None:
        """The client is gone: nothing of it can touch memory any more."""
        context = self._context
        context.mailboxes.forget(session.account)
        context.sessions.close(session)
        if isinstance(session, Reader):
            context.handoffs.lose_session(session.number, "the server that opened it is gone")
            self._lending.lose(session, why)
        else:
            self._lose_client(session, why)

    def _lose_client(self, session: ClientSession, why: str) -> None:
        context = self._context
        # A tool that asked and left is nothing that an operator has to know of.
        log = self._log.info if session.spec is not None or session.entered else self._log.debug
        log("session_lost", session=session.number, engine=session.name, pid=session.pid, why=why)
        context.plans.gone(session)
        context.span_questions.lose(session.number)
        context.trials.lost(session.number)
        if context.recorder.current is not None and session.spec is not None:
            context.recorder.current.note(SessionGone(time.monotonic(), session.number))
        if session.memory:
            context.handoffs.lose_engine(session.engine, "a worker of its engine is gone")
            context.driver.handle(SessionLost(session.number))
            context.driver.forget_session(session.number)
            context.slow_steps.forget(session.number)
        else:
            context.handoffs.lose_session(session.number, "who opened it is gone")
        if not context.sessions.has_engine(session.engine):
            context.metrics.engine_gone(session.name)
            context.driver.incoming.drop_leases(lambda owner: is_lease_of(session.engine, owner))
        if session.memory:
            self._workers_changed()
        context.metrics.sessions(context.sessions.workers(), context.sessions.bound_to_size())

    def _workers_changed(self) -> None:
        """Workers share what may be in flight by plans: they are told where their windows change, once per turn."""
        if not self._windows_due:
            self._windows_due = True
            asyncio.get_running_loop().call_soon(self._tell_windows)

    def _tell_windows(self) -> None:
        self._windows_due = False
        terms = self._context.terms()
        if terms.window_bytes == self._told_window:
            return
        self._told_window = terms.window_bytes
        for worker in self._context.sessions:
            if worker.memory:
                self._context.send(worker, terms)

    def _refuse(self, session: ClientSession, message: ToServer, code: str, error: LayerflowError) -> None:
        self._context.metrics.protocol_error(code)
        unlogged = self._context.log_limit.admit(time.monotonic())
        if unlogged is not None:
            self._log.warning("message_refused", session=session.number, code=code, error=str(error), unlogged=unlogged)
        if isinstance(message, wire.OpenStep):
            step_refused(self._context, session, message)
        number = getattr(message, "id", getattr(message, "step", -1))
        self._context.send(session, wire.Problem(number, code, str(error)))

    @property
    def _lending(self) -> Lending:
        """What this server lends; without it no reader has a session."""
        peers = self._context.peers
        assert peers is not None and peers.lending is not None
        return peers.lending

    async def _dispatch_reader(self, reader: Reader, message: ToServer) -> None:
        match message:
            case wire.PeerOpenHandoff() | wire.PeerEndHandoff() | wire.PeerReleaseHandoff():
                await keep_part(self._context, reader, message)
            case wire.Bye():
                self.lose(reader, "bye")
            case _:
                await self._lending.handle(reader, message)

    async def _dispatch(self, session: ClientSession, message: ToServer) -> None:
        context = self._context
        session.rights.check(message, session.engine)
        match message:
            case wire.Report():
                self._worker(session, "Report")
                await report(context, session, message)
            case wire.OpenStep():
                self._worker(session, "OpenStep")
                await open_step(context, session, message)
            case wire.Lookup():
                await self._lookups.look_up(session, message)
            case wire.Attach():
                self._attach(session, message)
            case wire.Abort():
                self._worker(session, "Abort")
                await tell(context, (RequestAborted(session.number, name) for name in message.requests))
            case wire.DropLease():
                self._drop_lease(session, message)
            case wire.Missed():
                if session.spec is None:
                    raise Refused("not_attached", "attach a spec before looking up")
                if not (1 <= message.requests <= MOST_MISSED and 0 <= message.tokens <= MOST_MISSED_TOKENS):
                    raise ProtocolError(f"{message.requests} lookups of {message.tokens} tokens cannot have missed")
                context.metrics.lookups_missed(session.labels, message.requests, message.tokens)
                session.figures.lookup_tokens += message.tokens
                if context.recorder.current is not None:
                    missed = LookupsMissed(time.monotonic(), session.number, message.requests, message.tokens)
                    context.recorder.current.note(missed)
            case wire.StatusRequest():
                context.send(session, wire.Status(message.id, msgspec.json.encode(context.status())))
            case wire.RecordRequest():
                self._later(session, message, lambda: context.recorder.asked(message))
            case wire.TraceRequest():
                workers = self._workers_named(message.engine)
                most = answer_bytes(context.settings().max_client_bytes)
                asked = functools.partial(trace_workers, context.span_questions, workers, message.seconds, most)
                self._later(session, message, asked, kept_bytes(len(workers), most), abandon=True)
            case wire.TrySettings():
                there = functools.partial(context.sessions.get, session.number)
                self._later(
                    session,
                    message,
                    lambda: context.trials.asked(message, session, lambda: there() is not session),
                    len(message.content),
                )
            case wire.Spans():
                self._worker(session, "Spans")
                context.span_questions.answered(session, message)
            case wire.DescribeChunks():
                await describe_chunks(context, session, message)
            case wire.ReadChunks():
                await read_chunks(context, session, message)
            case wire.Purge():
                self._later(session, message, lambda: purge(context, session, tier=message.tier))
            case wire.Reset():
                rest = reset_engine(context, session.engine)
                self._later(session, message, lambda: in_turns(rest), always=True)
            case wire.OpenHandoff():
                await open_handoff(context, session, message)
            case wire.EndHandoff():
                end_handoff(context, session, message)
            case wire.ReleaseHandoff():
                release_handoff(context, message)
            case wire.WatchHandoff():
                await watch_handoff(context, session, message)
            case wire.Bye():
                if not session.memory:
                    self.lose(session, "bye")
            case wire.Hello():
                raise Refused("twice", f"session {session.number} has already said hello")
            case _:
                raise ProtocolError(f"{type(message).__name__} is for servers that read here; say PeerHello first")

    def _workers_named(self, engine: str) -> list[ClientSession]:
        """:raises Refused: no such worker is attached."""
        workers = [each for each in self._context.sessions if each.memory and engine in ("", each.name, each.engine)]
        if not workers:
            names = sorted({each.name for each in self._context.sessions if each.memory})
            there = f"there are {', '.join(names)}" if names else "no engine worker is attached"
            raise Refused("no_engine", f"no worker of engine {engine!r}: {there}" if engine and names else there)
        return workers

    def _drop_lease(self, session: ClientSession, message: wire.DropLease) -> None:
        context, engine = self._context, session.engine
        if message.lease_ms:
            until = time.monotonic() + message.lease_ms / 1e3
            if not 0 < message.lease_ms <= int(context.settings().max_deadline_s * 1e3):
                raise ProtocolError(f"request {message.request!r}: a lease of {message.lease_ms} ms")
            context.plans.drop(engine, message.plan, until)
            return
        if message.plan > 0:
            context.plans.drop(engine, message.plan)
            return
        if message.plan < 0:
            context.plans.drop_told(session, message.request)
        owner = lease_owner(engine, message.request)
        session.hit_leases.pop(message.request, None)
        context.driver.follows.disallow(engine, message.request)
        context.leases.end(owner)

    def _later(
        self,
        session: ClientSession,
        message: wire.RecordRequest | wire.TraceRequest | wire.TrySettings | wire.Purge | wire.Reset,
        work: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        nbytes: int = 0,
        *,
        abandon: bool = False,
        always: bool = False,
    ) -> None:
        """Answer with what `work` returns, if the client is still there then.

        :param nbytes: that it keeps at most. :param abandon: it ends with the client, who alone wants it.
        :param always: it goes on with what has begun, however much is kept.
        """
        number = message.id

        async def answer() -> None:
            try:
                told = await work()
            except LayerflowError as error:
                code = error.code if isinstance(error, (NotAllowed, Refused)) else "invalid"
                self._context.metrics.protocol_error(code)
                self._log.warning("message_refused", session=session.number, code=code, error=str(error))
                self._context.send(session, wire.Problem(number, code, str(error)))
                return
            except BUGS as error:
                self._log.exception("message_failed", session=session.number, kind=type(message).__name__)
                self._context.send(session, wire.Problem(number, "internal", f"{type(error).__name__}: {error}"))
                return
            if self._context.sessions.get(session.number) is session:
                self._context.send(session, wire.Status(number, msgspec.json.encode(told)))

        charge = session.account.charge("an answer that takes long", nbytes, always=always)
        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            charge.release()
            self._answering.discard(ended)

        def cancel() -> None:
            task.cancel()

        task.add_done_callback(done)
        if abandon:
            charge.on_end(cancel)

    def _worker(self, session: ClientSession, what: str) -> None:
        if not session.memory:
            raise Refused("no_memory", f"{what} is for engine workers; attach with memory first")

    def _attach(self, session: ClientSession, message: wire.Attach) -> None:
        context = self._context
        if session.spec is not None:
            raise Refused("twice", f"session {session.number} is already attached; a new spec needs a new session")
        if message.memory:
            if not session.entered:
                raise Refused(
                    "no_arena",
                    "an engine worker fetches the arena at the fd server before it attaches; on other hosts "
                    "there is none: attach without memory",
                )
            if message.direct and not context.direct:
                raise Refused("not_direct", "this server's workers move bytes through the arena; attach without direct")
            if context.draining:
                raise Refused("draining", "the server is shutting down")
            most = context.settings().max_sessions
            if context.sessions.workers() >= most:
                raise Refused("too_many", f"server.max_sessions = {most} engine workers are attached")
            spec = message.spec
            shapes = tuple(LayerShape(group, spec.groups[group].bytes_per_block) for group, _ in spec.layer_places())
            context.driver.handle(SessionOpened(session.number, shapes))
            context.pool.add_partition(spec)
            if context.sources is not None and context.sources.tier is not None:
                context.sources.tier.partitions.add_partition(spec)
        session.spec = message.spec
        if context.peers is not None and message.memory:
            context.peers.attached(message.spec)
        session.memory = message.memory
        session.direct = message.memory and message.direct
        context.metrics.sessions(context.sessions.workers(), context.sessions.bound_to_size())
        self._log.info(
            "session_attached",
            session=session.number,
            engine=session.name,
            engine_id=session.engine,
            pid=session.pid,
            model=message.spec.name,
            fingerprint=message.spec.fingerprint.hex(),
            memory=message.memory,
            direct=session.direct,
        )
        attached = wire.Attached(context.arena_bytes if message.memory else 0, context.terms(), context.incarnation)
        context.send(session, attached)
        recording, note = context.recorder.current, session_note(session, time.monotonic())
        if recording is not None and note is not None:
            recording.note(note)
        if message.memory:
            self._workers_changed()

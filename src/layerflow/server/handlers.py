"""What each message of a client does. Bad ones get a Problem and change nothing."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from layerflow.errors import InvalidTransition, LayerflowError, ProtocolError
from layerflow.flow.events import (
    BatchDone,
    BatchFailed,
    Event,
    FrontierReached,
    LayersComputed,
    LayerShape,
    LoadsFenced,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
)
from layerflow.hits import HitLength, find_hit
from layerflow.keys import DIGEST_BYTES
from layerflow.observe.metrics import Metrics
from layerflow.pool.base import Pool
from layerflow.server.driver import Driver
from layerflow.server.forget import purge, reset_engine
from layerflow.server.lookup import find_and_bring, hit_keys, unknown_keys
from layerflow.server.planner import plan_step
from layerflow.server.planner_direct import plan_direct
from layerflow.server.sessions import LOCAL, ClientSession, Sessions
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message, ToServer

if TYPE_CHECKING:
    from layerflow.server.tier.tier import Tier

MAX_LEASE_MS = 86_400_000
M = TypeVar("M", bound=ToServer)


class Refused(ProtocolError):
    """A well-formed message that cannot be done now; `code` is the Problem's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class ServerContext:
    """What the handlers work on.

    :param send: queue a message for a session.
    :param tier: what lies behind the pool; None = nothing.
    :param direct: engine workers may move bytes past the arena.
    :param draining: the server takes no new work.
    """

    pool: Pool
    driver: Driver
    sessions: Sessions
    metrics: Metrics
    send: Callable[[ClientSession, Message], None]
    terms: Callable[[], wire.Terms]
    status: Callable[[], dict[str, object]]
    arena_bytes: int
    max_workers: int
    tier: Tier | None = None
    direct: bool = False
    draining: bool = False


class Handlers:
    """Dispatches a session's messages."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.get_logger("layerflow.server")
        self._answering: set[asyncio.Task[None]] = set()

    def handle(self, session: ClientSession, message: ToServer) -> None:
        """Do what the message asks, or answer with a Problem."""
        self._guarded(session, message, self._dispatch)

    def _guarded(self, session: ClientSession, message: M, work: Callable[[ClientSession, M], None]) -> None:
        try:
            work(session, message)
        except Refused as error:
            self._refuse(session, message, error.code, error)
        except InvalidTransition as error:
            self._refuse(session, message, "impossible", error)
        except LayerflowError as error:
            self._refuse(session, message, "invalid", error)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # No message may take the loop, nor its sender's patience: a bug here costs this one request.
            self._log.exception("message_failed", session=session.number, kind=type(message).__name__)
            self._refuse(session, message, "internal", LayerflowError(f"{type(error).__name__}: {error}"))

    def lose(self, session: ClientSession, why: str) -> None:
        """The client is gone: nothing of it can touch memory any more."""
        context = self._context
        self._log.info("session_lost", session=session.number, engine=session.engine, pid=session.pid, why=why)
        context.sessions.close(session)
        if session.memory:
            context.driver.handle(SessionLost(session.number))
        context.pool.drop_owner(("session", session.number))
        context.metrics.sessions(context.sessions.workers())

    def _refuse(self, session: ClientSession, message: ToServer, code: str, error: LayerflowError) -> None:
        self._context.metrics.protocol_error(code)
        self._log.warning("message_refused", session=session.number, code=code, error=str(error))
        number = getattr(message, "id", getattr(message, "step", -1))
        self._context.send(session, wire.Problem(number, code, str(error)))

    def _dispatch(self, session: ClientSession, message: ToServer) -> None:
        match message:
            case wire.Report():
                self._report(session, message)
            case wire.OpenStep():
                self._open_step(session, message)
            case wire.Lookup():
                self._lookup(session, message)
            case wire.Beat():
                self._context.send(session, message)
            case wire.Attach():
                self._attach(session, message)
            case wire.Abort():
                self._worker(session, "Abort")
                self._context.driver.handle(*(RequestAborted(session.number, name) for name in message.requests))
            case wire.DropLease():
                owner = _lease_owner(session.engine, message.request)
                self._context.pool.release(owner)
                if self._context.tier is not None:
                    self._context.tier.drop_lease(owner)
            case wire.Missed():
                if session.spec is None:
                    raise Refused("not_attached", "attach a spec before looking up")
                if message.requests < 1 or message.tokens < 0:
                    raise ProtocolError(f"{message.requests} lookups of {message.tokens} tokens cannot have missed")
                self._context.metrics.lookups_missed(message.requests, message.tokens)
            case wire.StatusRequest():
                self._context.send(session, wire.Status(message.id, msgspec.json.encode(self._context.status())))
            case wire.Purge():
                if session.address[0] != LOCAL:
                    raise Refused("local_only", "only clients of this machine may purge the pool")
                self._later(session, message.id, purge(self._context, session, tier=message.tier))
            case wire.Reset():
                told = reset_engine(self._context, session.engine)
                self._context.send(session, wire.Status(message.id, msgspec.json.encode(told)))
            case wire.Bye():
                if not session.memory:
                    self.lose(session, "bye")
            case wire.Hello():
                raise Refused("twice", f"session {session.number} has already said hello")

    def _later(self, session: ClientSession, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Answer with what `work` returns, if the client is still there then."""

        async def answer() -> None:
            try:
                told = await work
            except LayerflowError as error:
                self._log.exception("message_failed", session=session.number, kind="Purge")
                self._context.send(session, wire.Problem(number, "internal", str(error)))
                return
            if self._context.sessions.get(session.number) is session:
                self._context.send(session, wire.Status(number, msgspec.json.encode(told)))

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

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
                    "an engine worker fetches the arena at the doorway before it attaches; on other hosts "
                    "there is none: attach without memory",
                )
            if message.direct and not context.direct:
                raise Refused("not_direct", "this server's workers move bytes through the arena; attach without direct")
            if context.draining:
                raise Refused("draining", "the server is shutting down")
            if context.sessions.workers() >= context.max_workers:
                raise Refused("too_many", f"server.max_sessions = {context.max_workers} engine workers are attached")
            spec = message.spec
            shapes = tuple(LayerShape(group, spec.groups[group].bytes_per_block) for group, _ in spec.layer_places())
            context.driver.handle(SessionOpened(session.number, shapes, spec.shard.tp_rank, spec.shard.tp_size))
        session.spec = message.spec
        session.memory = message.memory
        session.direct = message.memory and message.direct
        context.metrics.sessions(context.sessions.workers())
        self._log.info(
            "session_attached",
            session=session.number,
            engine=session.engine,
            pid=session.pid,
            model=message.spec.name,
            fingerprint=message.spec.fingerprint.hex(),
            memory=message.memory,
            direct=session.direct,
        )
        context.send(session, wire.Attached(context.arena_bytes if message.memory else 0, context.terms()))

    def _lookup(self, session: ClientSession, message: wire.Lookup) -> None:
        if session.spec is None:
            raise Refused("not_attached", "attach a spec before looking up")
        digests = codec.split_digests(message.digests, f"request {message.request!r}")
        chunks = message.tokens // session.spec.chunk_tokens
        if len(message.root) != DIGEST_BYTES or message.tokens < 0 or len(digests) != chunks:
            raise ProtocolError(
                f"request {message.request!r}: {len(digests)} digests and a root of {len(message.root)} bytes for "
                f"{message.tokens} tokens; {chunks} digests and {DIGEST_BYTES} bytes belong"
            )
        if len(message.tail) not in (0, DIGEST_BYTES) or (
            message.tail and not message.tokens % session.spec.chunk_tokens
        ):
            raise ProtocolError(
                f"request {message.request!r}: a tail digest of {len(message.tail)} bytes for {message.tokens} tokens; "
                f"{DIGEST_BYTES} bytes where the full chunks leave tokens, else none"
            )
        if not 0 < message.lease_ms <= MAX_LEASE_MS:
            raise ProtocolError(f"request {message.request!r}: lease_ms must be 1 to {MAX_LEASE_MS}")
        context = self._context
        if context.tier is None:
            hit = find_hit(context.pool, session.spec, message.root, digests, message.tokens, message.tail)
            self._found(session, message, digests, hit)
            return

        number, resets = session.number, session.resets

        def answer(found: frozenset[bytes]) -> None:
            asker = context.sessions.get(number)
            if asker is not None and asker.resets != resets:
                # Its keys are those of weights that were replaced while the tier was asked: nothing is brought for it.
                self._context.send(asker, wire.Found(message.id, 0, []))
            elif asker is not None:
                self._guarded(asker, message, functools.partial(self._reach, digests=digests, found=found))

        asked = [*digests, message.tail] if message.tail else digests
        direct = any(worker.direct for worker in context.sessions.workers_of(session.engine))
        context.tier.ask(unknown_keys(context.pool, context.tier, session.spec, asked, direct=direct), answer)

    def _reach(
        self, session: ClientSession, message: wire.Lookup, digests: list[bytes], found: frozenset[bytes]
    ) -> None:
        """The tier has answered: what the hit needs of it is fetched from now on."""
        pool, tier, spec = self._context.pool, self._context.tier, session.spec
        assert tier is not None and spec is not None
        workers = self._context.sessions.workers_of(session.engine)
        direct = any(worker.direct for worker in workers)
        # What a worker reads straight from the tier is not brought.
        through = {worker.spec.shard for worker in workers if worker.spec is not None and not worker.direct}
        shards = [*through] if workers else spec.shard.peers()
        prompt = message.root, digests, message.tokens, message.tail
        hit = find_and_bring(pool, tier, spec, shards, prompt, found, direct=direct)
        self._found(session, message, digests, hit)

    def _found(self, session: ClientSession, message: wire.Lookup, digests: list[bytes], hit: HitLength) -> None:
        assert session.spec is not None
        if hit.tokens or hit.tails:
            until, owner = time.monotonic() + message.lease_ms / 1e3, _lease_owner(session.engine, message.request)
            keys = hit_keys(session.spec, digests, hit)
            there = self._context.pool.lookup(keys)
            self._context.pool.acquire([key for key, here in zip(keys, there, strict=True) if here], owner, until)
            if self._context.tier is not None:
                self._context.tier.lease(keys, owner, until)
        tails = [wire.TailHit(tail.chunk, tail.tokens, tail.digest) for tail in hit.tails]
        self._context.send(session, wire.Found(message.id, hit.tokens, tails))
        self._context.metrics.lookup(hit.tokens, message.tokens - hit.tokens)

    def _open_step(self, session: ClientSession, message: wire.OpenStep) -> None:
        context = self._context
        self._worker(session, "OpenStep")
        key = (session.number, message.step)
        if context.draining:
            raise Refused("draining", "the server is shutting down")
        if context.driver.is_open(key):
            raise ProtocolError(f"step {message.step} is already open")
        now = time.monotonic()
        opening = (
            plan_direct(session, message, now)
            if session.direct
            else plan_step(context.pool, context.tier, session, message, now)
        )
        context.driver.open(key, opening.book)
        # The plan goes first: batches that follow are numbered by it.
        context.send(session, opening.plan)
        try:
            context.driver.handle(opening.event)
        except InvalidTransition:
            context.driver.discard(key)
            raise
        if context.tier is not None:
            context.tier.watch(opening.arrivals)
        for request, keys in opening.loaded:
            # Only what this worker has pinned itself now: the other ranks' objects are still leased for them.
            owner = _lease_owner(session.engine, request)
            context.pool.release(owner, keys)
            if context.tier is not None:
                context.tier.drop_lease(owner, keys)
        context.metrics.step_opened(full=opening.full, missing=opening.missing)

    def _report(self, session: ClientSession, message: wire.Report) -> None:
        self._worker(session, "Report")
        for failure in message.failed:
            self._log.warning("batch_failed", session=session.number, batch=failure.batch, reason=failure.reason)
        self._context.driver.handle(*_events(session.number, message))
        for figures in message.figures:
            self._context.metrics.step_measured(figures)


def _lease_owner(engine: str, request: str) -> tuple[str, str, str]:
    return ("lease", engine, request)


def _events(session: int, report: wire.Report) -> Iterator[Event]:
    for place in report.progress:
        if place.frontier >= 0:
            yield FrontierReached(session, place.step, place.frontier)
        if place.computed > 0:
            yield LayersComputed(session, place.step, place.computed)
    for batch in report.done:
        yield BatchDone(session, batch)
    for fence in report.fenced:
        yield LoadsFenced(session, fence.step, fence.reason)
    for failure in report.failed:
        yield BatchFailed(session, failure.batch, failure.reason)
    for closed in report.closed:
        yield StepClosed(session, closed.step, closed.ok)

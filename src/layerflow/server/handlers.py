"""What each message of a client does. Bad ones get a Problem and change nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
from layerflow.server.lookup import hit_keys
from layerflow.server.planner import plan_step
from layerflow.server.planner_direct import plan_direct
from layerflow.server.reach import find_and_bring, unknown_keys
from layerflow.server.sessions import LOCAL, Session, Sessions
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message, ToServer

if TYPE_CHECKING:
    from layerflow.server.tier import Tier

MAX_LEASE_MS = 86_400_000
M = TypeVar("M", bound=ToServer)


class Refused(ProtocolError):
    """A well-formed message that cannot be done now; `code` is the Problem's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class House:
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
    send: Callable[[Session, Message], None]
    terms: Callable[[], wire.Terms]
    status: Callable[[], dict[str, object]]
    arena_bytes: int
    max_workers: int
    tier: Tier | None = None
    direct: bool = False
    draining: bool = False


class Handlers:
    """Dispatches a session's messages."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._log = structlog.get_logger("layerflow.server")

    def handle(self, session: Session, message: ToServer) -> None:
        """Do what the message asks, or answer with a Problem."""
        self._guarded(session, message, self._dispatch)

    def _guarded(self, session: Session, message: M, work: Callable[[Session, M], None]) -> None:
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

    def lose(self, session: Session, why: str) -> None:
        """The client is gone: nothing of it can touch memory any more."""
        house = self._house
        self._log.info("session_lost", session=session.number, engine=session.engine, pid=session.pid, why=why)
        house.sessions.close(session)
        if session.memory:
            house.driver.handle(SessionLost(session.number))
        if house.tier is not None and not any(other.engine == session.engine for other in house.sessions):
            house.tier.drop_leases(session.engine)
        house.metrics.sessions(house.sessions.workers())

    def _refuse(self, session: Session, message: ToServer, code: str, error: LayerflowError) -> None:
        self._house.metrics.protocol_error(code)
        self._log.warning("message_refused", session=session.number, code=code, error=str(error))
        number = getattr(message, "id", getattr(message, "step", -1))
        self._house.send(session, wire.Problem(number, code, str(error)))

    def _dispatch(self, session: Session, message: ToServer) -> None:
        match message:
            case wire.Report():
                self._report(session, message)
            case wire.OpenStep():
                self._open_step(session, message)
            case wire.Lookup():
                self._lookup(session, message)
            case wire.Beat():
                self._house.send(session, message)
            case wire.Attach():
                self._attach(session, message)
            case wire.Abort():
                self._worker(session, "Abort")
                self._house.driver.handle(*(RequestAborted(session.number, name) for name in message.requests))
            case wire.DropLease():
                owner = _lease_owner(session.engine, message.request)
                self._house.pool.release(owner)
                if self._house.tier is not None:
                    self._house.tier.drop_lease(owner)
            case wire.Missed():
                if session.spec is None:
                    raise Refused("not_attached", "attach a spec before looking up")
                if message.requests < 1 or message.tokens < 0:
                    raise ProtocolError(f"{message.requests} lookups of {message.tokens} tokens cannot have missed")
                self._house.metrics.lookups_missed(message.requests, message.tokens)
            case wire.StatusRequest():
                self._house.send(session, wire.Status(message.id, msgspec.json.encode(self._house.status())))
            case wire.Purge():
                if session.address[0] != LOCAL:
                    raise Refused("local_only", "only clients of this machine may purge the pool")
                purged = self._house.pool.clear()
                self._log.info("pool_purged", session=session.number, objects=purged)
                self._house.send(session, wire.Status(message.id, msgspec.json.encode({"purged": purged})))
            case wire.Bye():
                if not session.memory:
                    self.lose(session, "bye")
            case wire.Hello():
                raise Refused("twice", f"session {session.number} has already said hello")

    def _worker(self, session: Session, what: str) -> None:
        if not session.memory:
            raise Refused("no_memory", f"{what} is for engine workers; attach with memory first")

    def _attach(self, session: Session, message: wire.Attach) -> None:
        house = self._house
        if session.spec is not None:
            raise Refused("twice", f"session {session.number} is already attached; a new spec needs a new session")
        if message.memory:
            if not session.entered:
                raise Refused(
                    "no_arena",
                    "an engine worker fetches the arena at the doorway before it attaches; on other hosts "
                    "there is none: attach without memory",
                )
            if message.direct and not house.direct:
                raise Refused("not_direct", "this server's workers move bytes through the arena; attach without direct")
            if house.draining:
                raise Refused("draining", "the server is shutting down")
            if house.sessions.workers() >= house.max_workers:
                raise Refused("too_many", f"server.max_sessions = {house.max_workers} engine workers are attached")
            spec = message.spec
            shapes = tuple(LayerShape(group, spec.groups[group].bytes_per_block) for group, _ in spec.layer_places())
            house.driver.handle(SessionOpened(session.number, shapes, spec.shard.tp_rank, spec.shard.tp_size))
        session.spec = message.spec
        session.memory = message.memory
        session.direct = message.memory and message.direct
        house.metrics.sessions(house.sessions.workers())
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
        house.send(session, wire.Attached(house.arena_bytes if message.memory else 0, house.terms()))

    def _lookup(self, session: Session, message: wire.Lookup) -> None:
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
        house = self._house
        if house.tier is None:
            hit = find_hit(house.pool, session.spec, message.root, digests, message.tokens, message.tail)
            self._found(session, message, digests, hit)
            return

        number = session.number

        def answer(found: frozenset[bytes]) -> None:
            asker = house.sessions.get(number)
            if asker is not None:
                self._guarded(asker, message, functools.partial(self._reach, digests=digests, found=found))

        asked = [*digests, message.tail] if message.tail else digests
        direct = any(worker.direct for worker in house.sessions.workers_of(session.engine))
        house.tier.ask(unknown_keys(house.pool, house.tier, session.spec, asked, direct=direct), answer)

    def _reach(self, session: Session, message: wire.Lookup, digests: list[bytes], found: frozenset[bytes]) -> None:
        """The tier has answered: what the hit needs of it is fetched from now on."""
        pool, tier, spec = self._house.pool, self._house.tier, session.spec
        assert tier is not None and spec is not None
        workers = self._house.sessions.workers_of(session.engine)
        direct = any(worker.direct for worker in workers)
        # What a worker reads straight from the tier is not brought.
        through = {worker.spec.shard for worker in workers if worker.spec is not None and not worker.direct}
        shards = [*through] if workers else spec.shard.peers()
        prompt = message.root, digests, message.tokens, message.tail
        hit = find_and_bring(pool, tier, spec, shards, prompt, found, session.engine, direct=direct)
        self._found(session, message, digests, hit)

    def _found(self, session: Session, message: wire.Lookup, digests: list[bytes], hit: HitLength) -> None:
        assert session.spec is not None
        if hit.tokens or hit.tails:
            until, owner = time.monotonic() + message.lease_ms / 1e3, _lease_owner(session.engine, message.request)
            keys = hit_keys(session.spec, digests, hit)
            there = self._house.pool.lookup(keys)
            self._house.pool.acquire([key for key, here in zip(keys, there, strict=True) if here], owner, until)
            if self._house.tier is not None:
                self._house.tier.lease(keys, owner, until)
        tails = [wire.TailHit(tail.chunk, tail.tokens, tail.digest) for tail in hit.tails]
        self._house.send(session, wire.Found(message.id, hit.tokens, tails))
        self._house.metrics.lookup(hit.tokens, message.tokens - hit.tokens)

    def _open_step(self, session: Session, message: wire.OpenStep) -> None:
        house = self._house
        self._worker(session, "OpenStep")
        key = (session.number, message.step)
        if house.draining:
            raise Refused("draining", "the server is shutting down")
        if house.driver.is_open(key):
            raise ProtocolError(f"step {message.step} is already open")
        now = time.monotonic()
        opening = (
            plan_direct(session, message, now)
            if session.direct
            else plan_step(house.pool, house.tier, session, message, now)
        )
        house.driver.open(key, opening.book)
        # The plan goes first: batches that follow are numbered by it.
        house.send(session, opening.plan)
        try:
            house.driver.handle(opening.event)
        except InvalidTransition:
            house.driver.discard(key)
            raise
        for request, keys in opening.loaded:
            # Only what this worker has pinned itself now: the other ranks' objects are still leased for them.
            owner = _lease_owner(session.engine, request)
            house.pool.release(owner, keys)
            if house.tier is not None:
                house.tier.drop_lease(owner, keys)
        house.metrics.step_opened(full=opening.full, missing=opening.missing)

    def _report(self, session: Session, message: wire.Report) -> None:
        self._worker(session, "Report")
        for failure in message.failed:
            self._log.warning("batch_failed", session=session.number, batch=failure.batch, reason=failure.reason)
        self._house.driver.handle(*_events(session.number, message))
        for figures in message.figures:
            self._house.metrics.step_measured(figures)


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

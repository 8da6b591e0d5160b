"""What each message of a client does. Bad ones get a Problem and change nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from layerflow.config.settings import ServerSettings
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
from layerflow.hits import HitLength, search_hit
from layerflow.keys import DIGEST_BYTES
from layerflow.observe.metrics import Metrics
from layerflow.observe.slow_steps import SlowSteps
from layerflow.pool.base import Pool
from layerflow.server.driver import Driver
from layerflow.server.forget import purge, reset_engine
from layerflow.server.log_limit import LogLimit
from layerflow.server.lookup import TierLookup, ask_tier, find_and_bring, hit_keys, prompt_keys
from layerflow.server.planner import check_deadlines, check_step, count_objects, plan_step
from layerflow.server.planner_direct import plan_direct
from layerflow.server.sessions import LOCAL, ClientSession, Sessions
from layerflow.server.turns import Turns, Work
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message, ToServer

if TYPE_CHECKING:
    from layerflow.server.tier.tier import Tier

Search = Generator[None, None, HitLength]

EVENTS_PER_SLICE = 64
"""Items of a Report that are handled before another client may get its turn."""

MOST_MISSED, MOST_MISSED_TOKENS = 1 << 20, 1 << 40
"""Lookups, and their tokens, that one Missed may tell of: a client sends it every second."""

MOST_MEASURED = 1 << 53
"""Bytes or seconds that one step can have moved or taken: what a float counts exactly."""

MOST_SEARCHES = 3
"""How often a lookup starts over because objects were evicted between its slices."""


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
    slow_steps: SlowSteps
    send: Callable[[ClientSession, Message], None]
    terms: Callable[[], wire.Terms]
    status: Callable[[], dict[str, object]]
    arena_bytes: int
    settings: Callable[[], ServerSettings]
    turns: Turns = field(default_factory=Turns)
    log_limit: LogLimit = field(default_factory=LogLimit)
    tier: Tier | None = None
    direct: bool = False
    draining: bool = False


class Handlers:
    """Dispatches a session's messages."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.get_logger("layerflow.server")
        self._answering: set[asyncio.Task[None]] = set()

    def handle(self, session: ClientSession, message: ToServer, nbytes: int = 0) -> None:
        """Do what the message asks, or answer with a Problem; behind the client's other messages.

        :param nbytes: of the message.
        """
        if isinstance(message, wire.Beat):
            self._context.send(session, message)
        elif self._context.turns.has_room(session.number, nbytes):
            self._context.turns.start(session.number, self._guarded(session, message, self._dispatch), nbytes)
        else:
            waiting = LayerflowError("too many of this client's messages wait to be handled; send them more slowly")
            self._refuse(session, message, "quota", waiting)

    def _guarded(
        self, session: ClientSession, message: ToServer, work: Callable[[ClientSession, ToServer], Work]
    ) -> Work:
        try:
            yield from work(session, message)
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
        context.turns.forget(session.number)
        context.sessions.close(session)
        if session.memory:
            context.driver.handle(SessionLost(session.number))
            context.driver.forget_session(session.number)
            context.slow_steps.forget(session.number)
        if context.tier is not None and not any(other.engine == session.engine for other in context.sessions):
            context.tier.drop_leases(session.engine)
        context.metrics.sessions(context.sessions.workers())

    def _refuse(self, session: ClientSession, message: ToServer, code: str, error: LayerflowError) -> None:
        self._context.metrics.protocol_error(code)
        unlogged = self._context.log_limit.admit(time.monotonic())
        if unlogged is not None:
            self._log.warning("message_refused", session=session.number, code=code, error=str(error), unlogged=unlogged)
        number = getattr(message, "id", getattr(message, "step", -1))
        self._context.send(session, wire.Problem(number, code, str(error)))

    def _dispatch(self, session: ClientSession, message: ToServer) -> Work:
        match message:
            case wire.Report():
                yield from self._report(session, message)
            case wire.OpenStep():
                yield from self._open_step(session, message)
            case wire.Lookup():
                yield from self._lookup(session, message)
            case wire.Attach():
                self._attach(session, message)
            case wire.Abort():
                self._worker(session, "Abort")
                yield from self._tell(RequestAborted(session.number, name) for name in message.requests)
            case wire.DropLease():
                owner = _lease_owner(session.engine, message.request)
                session.leases.pop(message.request, None)
                self._context.pool.release(owner)
                if self._context.tier is not None:
                    self._context.tier.drop_lease(owner)
            case wire.Missed():
                if session.spec is None:
                    raise Refused("not_attached", "attach a spec before looking up")
                if not (1 <= message.requests <= MOST_MISSED and 0 <= message.tokens <= MOST_MISSED_TOKENS):
                    raise ProtocolError(f"{message.requests} lookups of {message.tokens} tokens cannot have missed")
                self._context.metrics.lookups_missed(session.labels, message.requests, message.tokens)
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

    def _lookup(self, session: ClientSession, message: wire.Lookup) -> Work:
        if session.spec is None:
            raise Refused("not_attached", "attach a spec before looking up")
        context, limits = self._context, self._context.settings()
        asked_for = (len(message.digests) // DIGEST_BYTES + 1) * len(session.spec.groups)
        asked_for *= len(session.spec.shard.peers())
        if asked_for > limits.max_lookup_objects:
            raise Refused(
                "quota",
                f"request {message.request!r}: chunks x groups x shards are {asked_for} objects, "
                f"server.max_lookup_objects is {limits.max_lookup_objects}; look up a shorter prompt",
            )
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
        most_ms = int(limits.max_deadline_s * 1e3)
        if not 0 < message.lease_ms <= most_ms:
            raise ProtocolError(
                f"request {message.request!r}: lease_ms must be 1 to {most_ms}, which is server.max_deadline_s"
            )
        if message.written_ms:
            self._written(session, message, digests, most_ms)
            return
        self._check_leases(session, message.request, limits.max_leases)
        heard = time.monotonic()
        if context.tier is None:
            prompt = message.root, digests, message.tokens, message.tail
            pool, spec = context.pool, session.spec
            yield from self._find(session, message, digests, heard, lambda: search_hit(pool, spec, *prompt))
            return

        number, resets = session.number, session.resets

        def answer(found: frozenset[bytes]) -> None:
            asker = context.sessions.get(number)
            if asker is not None and asker.resets != resets:
                # Its keys are those of weights that were replaced while the tier was asked: nothing is brought for it.
                context.send(asker, wire.Found(message.id, 0, []))
            elif asker is not None:
                reach = functools.partial(self._reach, lookup=message, digests=digests, found=found, heard=heard)
                context.turns.start(number, self._guarded(asker, message, reach))

        direct = any(worker.direct for worker in context.sessions.workers_of(session.engine))
        prompt_digests = digests, message.tokens, message.tail
        go = functools.partial(self._go_on, number, message)
        yield from ask_tier(context.pool, context.tier, session.spec, prompt_digests, answer, go, direct=direct)

    def _go_on(self, number: int, message: wire.Lookup, work: Work) -> None:
        """Go on with a client's lookup, in its turn, once something it waited for has come."""
        asker = self._context.sessions.get(number)
        if asker is not None:
            self._context.turns.start(number, self._guarded(asker, message, lambda *_: work))

    def _written(self, session: ClientSession, message: wire.Lookup, digests: list[bytes], most_ms: int) -> None:
        """Wait for what of the prompt is on its way into the tier; then of how many tokens is everything there?"""
        context, spec, number = self._context, session.spec, session.number
        tier = context.tier
        assert spec is not None
        if not 0 < message.written_ms <= most_ms:
            raise ProtocolError(f"request {message.request!r}: written_ms must be 0 to {most_ms}")
        if tier is None:
            context.send(session, wire.Found(message.id, 0, []))
            return
        go = functools.partial(self._go_on, number, message)

        def tell(found: frozenset[bytes]) -> Work:
            prompt = message.root, digests, message.tokens, message.tail
            hit = yield from search_hit(TierLookup(tier, found), spec, *prompt)
            context.send(session, _found(message.id, hit))

        asked = [*digests, message.tail] if message.tail else digests
        lookup = digests, message.tokens, message.tail
        tier.when_written(
            prompt_keys(spec, asked),
            time.monotonic() + message.written_ms / 1e3,
            lambda: go(ask_tier(context.pool, tier, spec, lookup, lambda found: go(tell(found)), go, direct=True)),
        )

    def _reach(
        self,
        session: ClientSession,
        _: ToServer,
        *,
        lookup: wire.Lookup,
        digests: list[bytes],
        found: frozenset[bytes],
        heard: float,
    ) -> Work:
        """The tier has answered: what the hit needs of it is fetched from now on."""
        pool, tier, spec = self._context.pool, self._context.tier, session.spec
        assert tier is not None and spec is not None
        workers = self._context.sessions.workers_of(session.engine)
        direct = any(worker.direct for worker in workers)
        # What a worker reads straight from the tier is not brought.
        through = {worker.spec.shard for worker in workers if worker.spec is not None and not worker.direct}
        shards = [*through] if workers else spec.shard.peers()
        prompt = lookup.root, digests, lookup.tokens, lookup.tail
        search = functools.partial(
            find_and_bring, pool, tier, spec, shards, prompt, found, session.engine, direct=direct
        )
        yield from self._find(session, lookup, digests, heard, search)

    def _find(
        self,
        session: ClientSession,
        message: wire.Lookup,
        digests: list[bytes],
        heard: float,
        search: Callable[[], Search],
    ) -> Work:
        """Search, lease and answer. What leaves the pool between two slices is searched for again."""
        for _ in range(MOST_SEARCHES):
            before = self._departures()
            hit = yield from search()
            yield from self._lease(session, message, digests, hit)
            # With a store behind the arena, the step that loads the hit brings back what leaves the arena now.
            if self._context.tier is not None or self._departures() == before:
                break
        self._found(session, message, hit, heard)

    def _departures(self) -> int:
        """How many objects have left the pool since the start."""
        figures = self._context.pool.statistics()
        return figures.evictions + figures.hidden

    def _check_leases(self, session: ClientSession, request: str, most: int) -> None:
        """:raises Refused: the client holds so many leases already."""
        leases = session.leases
        if request in leases or len(leases) < most:
            return
        now = time.monotonic()
        for name in [name for name, until in leases.items() if until <= now]:
            del leases[name]
        if len(leases) >= most:
            raise Refused(
                "quota",
                f"request {request!r}: this client holds server.max_leases = {most} leases; drop those that are not "
                "needed, or look up with a shorter lease_ms",
            )

    def _lease(self, session: ClientSession, message: wire.Lookup, digests: list[bytes], hit: HitLength) -> Work:
        assert session.spec is not None
        if hit.tokens or hit.tails:
            until, owner = time.monotonic() + message.lease_ms / 1e3, _lease_owner(session.engine, message.request)
            session.leases[message.request] = until
            for keys in hit_keys(session.spec, digests, hit):
                there = self._context.pool.lookup(keys)
                self._context.pool.acquire([key for key, here in zip(keys, there, strict=True) if here], owner, until)
                if self._context.tier is not None:
                    self._context.tier.lease(keys, owner, until)
                yield

    def _found(self, session: ClientSession, message: wire.Lookup, hit: HitLength, heard: float) -> None:
        self._context.send(session, _found(message.id, hit))
        self._context.metrics.lookup(session.labels, hit.tokens, message.tokens - hit.tokens, time.monotonic() - heard)

    def _open_step(self, session: ClientSession, message: wire.OpenStep) -> Work:
        context = self._context
        self._worker(session, "OpenStep")
        key = (session.number, message.step)
        if context.draining:
            raise Refused("draining", "the server is shutting down")
        if context.driver.is_open(key):
            raise ProtocolError(f"step {message.step} is already open")
        limits = context.settings()
        check_deadlines(message, time.monotonic(), limits.max_deadline_s)
        objects = count_objects(message)
        if objects > limits.max_step_objects:
            raise Refused(
                "quota",
                f"step {message.step}: {objects} objects, server.max_step_objects is {limits.max_step_objects}; "
                "move fewer requests in one step",
            )
        if len(session.open_steps) >= limits.max_open_steps:
            raise Refused(
                "quota",
                f"step {message.step}: server.max_open_steps = {limits.max_open_steps} steps of this session are open; "
                "close steps, and report their batches",
            )
        assert session.spec is not None
        checked = yield from check_step(session.spec, message)
        asked = sum(session.open_steps.values()) + checked.nbytes
        if asked > limits.max_open_bytes:
            raise Refused(
                "quota",
                f"step {message.step}: this session's open steps would move {asked} bytes, server.max_open_bytes is "
                f"{limits.max_open_bytes}; close steps first",
            )
        opening = (
            plan_direct(session, message, checked)
            if session.direct
            else plan_step(context.pool, context.tier, session, message, checked)
        )
        context.driver.open(key, opening.book)
        session.open_steps[message.step] = checked.nbytes
        # The plan goes first: batches that follow are numbered by it.
        context.send(session, opening.plan)
        try:
            context.driver.handle(opening.event)
        except InvalidTransition:
            context.driver.discard(key)
            del session.open_steps[message.step]
            raise
        for request, keys in opening.loaded:
            # Only what this worker has pinned itself now: the other ranks' objects are still leased for them.
            owner = _lease_owner(session.engine, request)
            context.pool.release(owner, keys)
            if context.tier is not None:
                context.tier.drop_lease(owner, keys)
        context.metrics.step_opened(session.labels, full=opening.full, missing=opening.missing)

    def _report(self, session: ClientSession, message: wire.Report) -> Work:
        self._worker(session, "Report")
        for failure in message.failed:
            unlogged = self._context.log_limit.admit(time.monotonic())
            if unlogged is not None:
                self._log.warning(
                    "batch_failed",
                    session=session.number,
                    batch=failure.batch,
                    reason=failure.reason,
                    unlogged=unlogged,
                )
        self._context.driver.time_batches(session.number, message)
        yield from self._tell(_events(session.number, message))
        for figures in message.figures:
            if not all(0 <= value < MOST_MEASURED for value in msgspec.structs.astuple(figures)[1:]):
                raise ProtocolError(f"step {figures.step}: {figures} cannot have been measured")
            self._context.metrics.step_measured(session.labels, figures)
            self._context.slow_steps.see(session, figures)

    def _tell(self, events: Iterator[Event]) -> Work:
        """Tell the core, in slices.

        :raises InvalidTransition: the first impossible event; all others were handled.
        """
        refused: InvalidTransition | None = None
        while few := list(itertools.islice(events, EVENTS_PER_SLICE)):
            try:
                self._context.driver.handle(*few)
            except InvalidTransition as error:
                refused = refused or error
            yield
        if refused is not None:
            raise refused


def _found(number: int, hit: HitLength) -> wire.Found:
    return wire.Found(number, hit.tokens, [wire.TailHit(tail.chunk, tail.tokens, tail.digest) for tail in hit.tails])


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

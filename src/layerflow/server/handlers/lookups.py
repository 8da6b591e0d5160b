"""Lookups: searched in slices, leased, answered; what a hit lacks in the arena is fetched."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import msgspec
import structlog

from layerflow.hits import HitLength, search_hit
from layerflow.observe.logs import LogRateLimiter
from layerflow.places import is_placed, unpack_places
from layerflow.pool.base import Owner
from layerflow.recording.notes import LookupNote
from layerflow.server.account import ENTRY_BYTES, Charge, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.following import follow_handoff, follow_saves, view_of_handoff
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handlers.lookup_requests import (
    LookupRequest,
    Replaced,
    asking_bytes,
    check_leases,
    check_lookup,
    count_pins,
    read_digests,
    read_lookup,
    running,
    running_on,
    search_prompt,
    unreplaced,
    until_of,
    waiting,
)
from layerflow.server.handlers.remote import DIGESTS_PER_SLICE, ask_servers
from layerflow.server.leases import PINNED_BYTES
from layerflow.server.mailboxes import Answer, Slices, in_slices, next_turn
from layerflow.server.plans import lookup_owner
from layerflow.server.search import (
    KEPT_KEY_BYTES,
    ask_tier,
    bring_pieces,
    find_and_bring,
    hit_keys,
    prompt_keys,
    prompt_objects,
    view_of_tier,
)
from layerflow.wire import messages as wire

log = structlog.get_logger("layerflow.server.handlers.lookups")

KEPT_WRITE_BYTES = 256
"""What a lookup keeps of a write that it waits for, in bytes: its number in a set, and its place among those who wait.
"""

MOST_SEARCHES = 3
"""How often a lookup starts over because objects were evicted between its slices."""


class LookupHandler:
    """Answers lookups."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log_limit = LogRateLimiter()

    async def look_up(self, session: ClientSession, message: wire.Lookup) -> None:
        """Answer it, now or once what it may wait for has come."""
        limits, resets = self._context.settings(), session.resets
        spec = check_lookup(session, message, limits)
        if not message.written_ms:
            check_leases(session, message.request, limits.max_leases)
        try:
            if message.written_ms:
                await self._written(session, message)
            elif message.handoff:
                await self._follow(session, message, until_of(message, limits), resets)
            else:
                saves = None
                with running(session, spec, message):
                    asked = await read_lookup(spec, message, resets)
                    if message.follow_ms > 0 and self._context.pd().follow == "auto":
                        saves = await follow_saves(self._context, session, asked)
                if saves is None:
                    await self._look(session, asked)
                else:
                    await self._find(
                        session,
                        asked,
                        time.monotonic(),
                        functools.partial(search_prompt, saves, spec, asked),
                        following=True,
                    )
        except Replaced:
            why = REPLACED if message.handoff else ""
            self._context.send(session, wire.Found(message.id, 0, [], False, why))

    async def _follow(self, session: ClientSession, message: wire.Lookup, until: float, resets: int) -> None:
        """Answer with a hit of a hand-off, or of what is stored where none can be followed in time, or at all."""
        context, spec, peers = self._context, session.spec, self._context.peers
        assert spec is not None
        if any(peers is None or not peers.is_own(each) for each in message.servers):
            running(session, spec, message).release()  # where no server can be asked it does not wait
            answer = await ask_servers(context, session, message, until)
            found = 0 if isinstance(answer, str) else len(answer.found) * KEPT_KEY_BYTES
            with running_on(session, spec, message, found):
                asked = await read_lookup(spec, message, resets)
            if isinstance(answer, str):
                await self._look(session, asked, answer)
            else:
                received_at = time.monotonic()
                await self._fetch_and_answer(
                    session, asked, answer.found, received_at, reason=answer.reason, following=answer.open, until=until
                )
            return
        handoff, why = await follow_handoff(context, session, message, until)
        with running_on(session, spec, message):
            asked = await read_lookup(spec, message, resets)
        if why:
            await self._look(session, asked, why)
        else:
            view = view_of_handoff(context.pool, handoff, context.driver.follows.given_up)
            search = functools.partial(search_prompt, view, spec, asked)
            await self._find(session, asked, time.monotonic(), search, following=True)

    async def _look(self, session: ClientSession, asked: LookupRequest, reason: str = "") -> None:
        """Answer with what is stored.

        :param reason: why the hand-off that was asked for is not followed.
        """
        context, message, spec = self._context, asked.message, session.spec
        assert spec is not None
        received_at = time.monotonic()
        if context.sources is None:
            await self._find(
                session, asked, received_at, functools.partial(search_prompt, context.pool, spec, asked), reason=reason
            )
            return
        # Direct workers read the pool themselves, and no peer.
        direct = any(worker.direct for worker in context.sessions.workers_of(session.engine))
        behind = context.sources.tier if direct else context.sources
        assert behind is not None
        prompt = asked.digests, message.tokens, message.tail
        with session.account.charge(waiting(message), asking_bytes(message)) as charge:
            question = ask_tier(context.pool, behind, spec, prompt, charge, blocks=asked.blocks, direct=direct)
            found = await unreplaced(session, question)
        if message.compute_ms:
            objects = prompt_objects(spec, len(asked.digests) + bool(message.tail))
            found = context.sources.worth_fetching(found, message.compute_ms / 1e3, objects)
        await self._fetch_and_answer(session, asked, found, received_at, reason=reason)

    async def _written(self, session: ClientSession, message: wire.Lookup) -> None:
        """Wait for what of the prompt is on its way into the tier; then of how many tokens is everything there?"""
        context, spec = self._context, session.spec
        tier = context.sources.tier if context.sources is not None else None
        assert spec is not None
        if tier is None:
            context.send(session, wire.Found(message.id, 0, []))
            return
        writes: set[int] = set()
        with running(session, spec, message):
            digests = await read_digests(message)
            digests = [*digests, message.tail] if message.tail else digests
            for start in range(0, len(digests), DIGESTS_PER_SLICE):
                writes |= tier.writing(prompt_keys(spec, digests[start : start + DIGESTS_PER_SLICE]))
                await next_turn()
            del digests  # read again behind the wait
        waits = asking_bytes(message) + len(writes) * KEPT_WRITE_BYTES
        with session.account.charge(waiting(message), waits) as charge:
            written = Answer[None](charge)
            forget = tier.when_written(writes, functools.partial(written.tell, None))
            del writes
            try:
                await written.by(time.monotonic() + message.written_ms / 1e3, None)
            finally:
                forget()
            digests = await read_digests(message)
            prompt = digests, message.tokens, message.tail
            found = await ask_tier(context.pool, tier, spec, prompt, charge, direct=True)
        there = view_of_tier(None, tier, found)
        search = search_hit(there, spec, message.root, digests, message.tokens, tail_digest=message.tail)
        with running_on(session, spec, message, len(found) * KEPT_KEY_BYTES):
            hit = await in_slices(search)
        context.send(session, _found(message.id, hit))

    async def _fetch_and_answer(
        self,
        session: ClientSession,
        asked: LookupRequest,
        found: frozenset[bytes],
        received_at: float,
        *,
        reason: str,
        following: bool = False,
        until: float | None = None,
    ) -> None:
        """Answer with what is here and what `found` names: what the hit needs of it is fetched from now on.

        :param until: objects of other partitions may take so long; None = as long as a lookup.
        """
        pool, sources, spec, lookup = self._context.pool, self._context.sources, session.spec, asked.message
        assert sources is not None and spec is not None
        workers = self._context.sessions.workers_of(session.engine)
        direct = any(worker.direct for worker in workers)
        # What a worker reads straight from the tier is not brought.
        through = {worker.spec.shard for worker in workers if worker.spec is not None and not worker.direct}
        shards = [*through] if workers else spec.shard.peers()
        prompt = lookup.root, asked.digests, lookup.tokens, lookup.tail
        covering = None if direct else pool.covering(spec)
        pieces: set[bytes] = set()
        kept = len(found) * KEPT_KEY_BYTES
        if covering is not None:
            there = view_of_tier(pool, sources, found, covering=covering)
            above = lookup.root, asked.digests
            with running_on(session, spec, lookup, kept):
                hit = await in_slices(search_prompt(there, spec, asked))
                pieces = await in_slices(
                    bring_pieces(
                        pool,
                        sources,
                        spec,
                        covering=covering,
                        prompt=above,
                        hit=hit,
                        found=found,
                        engine=session.engine,
                    )
                )
            del hit  # it is searched for again
        if pieces:
            # What has come by then counts; what comes later, for the next lookup of the prompt, while the lease lasts.
            come_by = received_at + sources.settings.lookup_timeout_ms / 1e3 if until is None else until
            lease_until = lookup.lease_ms / 1e3 + (time.monotonic() if until is None else until)
            check_leases(session, lookup.request, self._context.settings().max_leases)
            incoming, owner = self._context.driver.incoming, _owner(session, lookup)
            waits = asking_bytes(lookup) + len(pieces) * (KEPT_KEY_BYTES + PINNED_BYTES)
            with session.account.charge(waiting(lookup), waits) as charge:
                charge.resize(waits + kept)
                incoming.lease(pieces, owner, lease_until)
                come = Answer[None](charge)
                forget = incoming.when_come(pieces, functools.partial(come.tell, None))
                try:
                    await unreplaced(session, come.by(come_by, None))
                except BaseException:  # the client is lost, or its weights were replaced
                    self._context.leases.end(owner)
                    raise
                finally:
                    forget()
            lost = 0 if until is None else pool.lookup([*pieces]).count(False)
            if lost and not reason:
                reason = f"{lost} of {len(pieces)} objects of another size did not come"
        search = functools.partial(
            find_and_bring,
            pool,
            sources,
            spec,
            shards=shards,
            prompt=prompt,
            found=found,
            engine=session.engine,
            blocks=asked.blocks,
            direct=direct,
        )
        await self._find(session, asked, received_at, search, following=following, reason=reason, kept=kept)

    async def _find(
        self,
        session: ClientSession,
        asked: LookupRequest,
        received_at: float,
        search: Callable[[], Slices[HitLength]],
        *,
        following: bool = False,
        reason: str = "",
        kept: int = 0,
    ) -> None:
        """Search, lease and answer. What leaves the pool between two slices is searched for again.

        :param kept: bytes of what `search` has been given.
        """
        pool, message, spec = self._context.pool, asked.message, session.spec
        assert spec is not None
        owner = _owner(session, message)
        try:
            with running_on(session, spec, message, kept) as charge:
                searching = charge.nbytes - ENTRY_BYTES
                for _ in range(MOST_SEARCHES):
                    before = pool.departures
                    hit = await in_slices(search())
                    until = time.monotonic() + message.lease_ms / 1e3
                    places, leased = await self._lease(
                        session, asked, hit, owner, until, charge=charge, searching=searching
                    )
                    # With a store behind the arena, the step that loads the hit brings back what leaves the arena now.
                    if self._context.sources is not None or pool.departures == before:
                        break
            if session.resets != asked.resets:
                raise Replaced
            # Nothing else runs before what is pinned counts as the plan's or the lease's.
            plan = self._plan(session, message, owner) if places else 0
            if self._keep(session, message.request, owner, until) and not plan:  # a plan counts until it ends
                session.hit_leases[message.request] = until
        finally:  # what has become neither a plan's nor the lease's, as the client is lost, say, or keeps too much
            self._context.leases.end(owner)
        tokens = self._found(
            session, message, hit, received_at, plan=plan, places=places, following=following, reason=reason
        )
        recording = self._context.recorder.current
        if recording is not None:
            now = time.monotonic()
            recording.note(LookupNote(received_at, now, session.number, message, tokens, leased, following))

    async def _lease(
        self,
        session: ClientSession,
        asked: LookupRequest,
        hit: HitLength,
        owner: Owner,
        until: float,
        *,
        charge: Charge,
        searching: int,
    ) -> tuple[bytes, bytes]:
        """Pin what is here of a hit, and lease what of it is on its way; nothing where the client keeps too much.

        :param owner: has the pins, until `until` (monotonic seconds).
        :param charge: what is pinned is counted with it, by this search and by those before.
        :param searching: bytes of it that the search takes.
        :returns: the places of its objects; empty where a load would need others too. And those of all that were to be
            pinned, whether or not they are here.
        """
        assert session.spec is not None
        spec = session.spec if hit.drafts else session.spec.own
        leases, sources, message = self._context.leases, self._context.sources, asked.message
        if not (hit.tokens or hit.tails):
            return b"", b""
        # Many lookups may have waited, for one hand-off or save: each lease is counted where it is made.
        check_leases(session, message.request, self._context.settings().max_leases)
        packed: list[bytes] = []
        located = 0
        for keys in hit_keys(spec, asked.digests, hit):
            located += len(keys)
            while True:
                places_here = leases.pin(session, keys, owner, until)
                if sources is not None:
                    self._context.driver.incoming.lease(keys, owner, until)
                charge.resize(searching)
                try:
                    lease = leases.charged(session, message.request)
                    count_pins(charge, message, lease, pinned=leases.held(owner), located=located)
                except Refused as refused:
                    self._not_leased(session, refused)
                    leases.end(owner)
                    return b"", b""
                if not leases.make_room(session, keys, owner):
                    break
                await next_turn()
            packed.append(places_here)
            await next_turn()
        told = b"".join(packed)
        # A plan's columns are the shards of the whole spec.
        if len(spec.shard.peers()) != len(session.spec.shard.peers()):
            return b"", told
        places = unpack_places(told, spec)
        assert places is not None
        first = len(places) - len(hit.tails)
        ends = ((tokens, first + tail if tail >= 0 else -1) for tokens, tail in hit.ends(spec, message.tokens))
        return told if any(is_placed(spec, places, tokens, row) for tokens, row in ends) else b"", told

    def _plan(self, session: ClientSession, message: wire.Lookup, owner: Owner) -> int:
        """Make what `owner` pins a plan's: its number; 0: no worker could use one, or the client keeps too much."""
        context = self._context
        workers = context.sessions.workers_of(session.engine)
        if not workers or any(worker.direct for worker in workers):
            return 0
        try:
            charge = context.leases.charge_plan(session, message.request, owner)
        except Refused:
            return 0
        numbers = [worker.number for worker in workers]
        return context.plans.keep(session, message.request, numbers, owner, charge)

    def _keep(self, session: ClientSession, request: str, owner: Owner, until: float) -> bool:
        """Make what `owner` pins, and what of the hit is still to come, the request's lease. Is there any?

        Where the client keeps too much, the hit stays one: it can be loaded as long as nothing else takes the room.
        """
        context = self._context
        if not context.leases.holds(owner):
            return False
        try:
            check_leases(session, request, context.settings().max_leases)
            context.leases.keep(session, request, owner, until)
        except Refused as refused:
            self._not_leased(session, refused)
            return False
        return True

    def _not_leased(self, session: ClientSession, refused: Refused) -> None:
        unlogged = self._log_limit.admit(time.monotonic())
        if unlogged is not None:
            log.warning("hit_not_leased", session=session.number, reason=str(refused), unlogged=unlogged)

    def _found(
        self,
        session: ClientSession,
        message: wire.Lookup,
        hit: HitLength,
        received_at: float,
        *,
        plan: int,
        places: bytes,
        following: bool,
        reason: str,
    ) -> int:
        """Answer, and count. The tokens that can be loaded for certain."""
        context = self._context
        told = msgspec.structs.replace(_found(message.id, hit), following=following, reason=reason)
        if plan:
            told = msgspec.structs.replace(told, plan=plan, incarnation=context.incarnation, places=places)
        context.send(session, told)
        assert session.spec is not None
        tokens = hit.surely(session.spec, message.tokens)
        self._context.metrics.lookup(session.labels, tokens, message.tokens - tokens, time.monotonic() - received_at)
        session.figures.lookup_tokens += message.tokens
        session.figures.hit_tokens += tokens
        return tokens


def _owner(session: ClientSession, message: wire.Lookup) -> Owner:
    return lookup_owner(session.engine, message.request, session.number, message.id)


def _found(number: int, hit: HitLength) -> wire.Found:
    tails = [wire.TailHit(tail.chunk, tail.tokens, tail.digest, tail.shared) for tail in hit.tails]
    return wire.Found(number, hit.tokens, tails, drafts=hit.drafts)

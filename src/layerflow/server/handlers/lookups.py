"""Lookups: searched in slices, leased, answered; what a hit lacks in the arena is fetched."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator

import msgspec

from layerflow.hits import BlockDigests, HitLength, search_hit
from layerflow.places import is_placed, unpack_places
from layerflow.pool.base import Owner
from layerflow.server.account import Refused
from layerflow.server.clients import ClientSession, Work
from layerflow.server.handlers.asked import Asked, check_leases, check_lookup, kept_bytes, read_lookup
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.following import FollowLookups
from layerflow.server.handlers.remote import DIGESTS_PER_SLICE, KEPT_KEY_BYTES, RemoteLookups
from layerflow.server.peers.questions import PeerAnswer
from layerflow.server.plans import lease_owner, lookup_owner
from layerflow.server.search import (
    ask_tier,
    bring_pieces,
    find_and_bring,
    hit_keys,
    prompt_keys,
    prompt_objects,
    view_of_tier,
)
from layerflow.wire import messages as wire
from layerflow.wire.messages import ToServer

Search = Generator[None, None, HitLength]

Guarded = Callable[[ClientSession, ToServer, Callable[[ClientSession, ToServer], Work]], Work]
"""Does work for a client's message; what goes wrong is answered with a Problem."""

PINNED_BYTES = 64
"""What the pin of one object takes, in bytes."""

MOST_SEARCHES = 3
"""How often a lookup starts over because objects were evicted between its slices."""


class Lookups:
    """Answers lookups.

    :param guarded: goes on with one later, for what it waited for has come.
    """

    def __init__(self, context: ServerContext, guarded: Guarded) -> None:
        self._context = context
        self._guarded = guarded
        self._following = FollowLookups(context, self, self._go_on)
        self._remote = RemoteLookups(context, self, self._go_on)

    def look_up(self, session: ClientSession, message: wire.Lookup) -> Work:
        limits = self._context.settings()
        spec = check_lookup(session, message, limits)
        if not message.written_ms:
            check_leases(session, message.request, limits.max_leases)
        peers = self._context.peers
        elsewhere = message.servers if peers is None else [each for each in message.servers if not peers.is_own(each)]
        if message.handoff and not elsewhere and not message.written_ms:
            yield from self._following.look_up(session, message)
            return
        asked = yield from read_lookup(spec, message)
        if message.written_ms:
            yield from self._written(session, asked)
            return
        if message.handoff:
            yield from self._remote.look_up(session, asked)
            return
        if message.follow_ms > 0 and self._context.pd().follow == "auto":
            yield from self._following.look_up_unasked(session, asked)
            return
        yield from self._look(session, message, asked.digests, asked.blocks)

    def stored(self, session: ClientSession, asked: Asked, reason: str) -> Work:
        """Answer with what is stored; `reason`: why a hand-off is not followed."""
        yield from self._look(session, asked.message, asked.digests, asked.blocks, reason)

    def followed(self, session: ClientSession, asked: Asked, search: Callable[[], Search]) -> Work:
        """Answer with a hit of a hand-off."""
        heard = time.monotonic()
        yield from self._find(session, asked.message, asked.digests, heard, search, following=True)

    def lent(self, session: ClientSession, asked: Asked, answer: PeerAnswer, until: float) -> Work:
        """Answer with a hit of what is here and what peers lend; objects of other sizes are waited for, to `until`."""
        yield from self._reach(
            session,
            asked.message,
            lookup=asked.message,
            digests=asked.digests,
            found=answer.found,
            heard=time.monotonic(),
            blocks=asked.blocks,
            reason=answer.reason,
            following=answer.open,
            until=until,
        )

    def _look(
        self,
        session: ClientSession,
        message: wire.Lookup,
        digests: list[bytes],
        blocks: BlockDigests,
        reason: str = "",
    ) -> Work:
        """What is stored.

        :param reason: why the hand-off that was asked for is not followed.
        """
        context = self._context
        assert session.spec is not None
        heard = time.monotonic()
        if context.tier is None:
            prompt = message.root, digests, message.tokens, message.tail
            pool, spec = context.pool, session.spec
            yield from self._find(
                session, message, digests, heard, lambda: search_hit(pool, spec, *prompt, blocks), reason=reason
            )
            return

        number, resets = session.number, session.resets
        charge = session.account.charge(f"request {message.request!r}: a lookup that waits", kept_bytes(message))
        objects = prompt_objects(session.spec, len(digests) + bool(message.tail))

        def answer(found: frozenset[bytes]) -> None:
            charge.release()
            asker = context.sessions.get(number)
            if message.compute_ms and context.tier is not None:
                found = context.tier.worth(found, message.compute_ms / 1e3, objects)
            if asker is not None and asker.resets != resets:
                # Its keys are those of weights that were replaced while the tier was asked: nothing is brought for it.
                context.send(asker, wire.Found(message.id, 0, [], False, reason))
            elif asker is not None:
                reach = functools.partial(
                    self._reach, lookup=message, digests=digests, found=found, heard=heard, blocks=blocks, reason=reason
                )
                context.turns.start(asker.account, self._guarded(asker, message, reach), always=True)

        direct = any(worker.direct for worker in context.sessions.workers_of(session.engine))
        behind = context.tier.tier if direct else context.tier  # direct workers read the pool themselves, and no peer
        assert behind is not None
        prompt_digests = digests, message.tokens, message.tail
        go = functools.partial(self._go_on, number, message)
        yield from ask_tier(
            context.pool, behind, session.spec, prompt_digests, answer, go, blocks=blocks, direct=direct
        )

    def _go_on(self, number: int, message: wire.Lookup, work: Work) -> None:
        """Go on with a client's lookup, in its turn, once something it waited for has come."""
        asker = self._context.sessions.get(number)
        if asker is not None:
            self._context.turns.start(asker.account, self._guarded(asker, message, lambda *_: work), always=True)

    def _written(self, session: ClientSession, asked: Asked) -> Work:
        """Wait for what of the prompt is on its way into the tier; then of how many tokens is everything there?"""
        context, spec, number, message = self._context, session.spec, session.number, asked.message
        tier = context.tier.tier if context.tier is not None else None
        assert spec is not None
        if tier is None:
            context.send(session, wire.Found(message.id, 0, []))
            return
        go = functools.partial(self._go_on, number, message)
        kept = len(asked.digests) * len(spec.groups) * len(spec.shard.peers()) * KEPT_KEY_BYTES
        charge = session.account.charge(f"request {message.request!r}: a lookup that waits", kept_bytes(message) + kept)

        def ask() -> Work:
            digests = (yield from read_lookup(spec, message)).digests
            yield from ask_tier(
                context.pool, tier, spec, (digests, message.tokens, message.tail), told, go, direct=True
            )

        def told(found: frozenset[bytes]) -> None:
            charge.release()
            go(tell(found))

        def tell(found: frozenset[bytes]) -> Work:
            digests = (yield from read_lookup(spec, message)).digests
            there = view_of_tier(None, tier, found)
            hit = yield from search_hit(there, spec, message.root, digests, message.tokens, message.tail)
            context.send(session, _found(message.id, hit))

        digests = [*asked.digests, message.tail] if message.tail else asked.digests
        keys: list[bytes] = []
        for start in range(0, len(digests), DIGESTS_PER_SLICE):
            keys += prompt_keys(spec, digests[start : start + DIGESTS_PER_SLICE])
            yield
        tier.when_written(keys, time.monotonic() + message.written_ms / 1e3, lambda: go(ask()))

    def _reach(
        self,
        session: ClientSession,
        _: ToServer,
        *,
        lookup: wire.Lookup,
        digests: list[bytes],
        found: frozenset[bytes],
        heard: float,
        blocks: BlockDigests,
        reason: str,
        following: bool = False,
        until: float | None = None,
    ) -> Work:
        """The tier has answered: what the hit needs of it is fetched from now on.

        :param until: objects of other partitions may take so long; None = as long as a lookup.
        """
        pool, tier, spec = self._context.pool, self._context.tier, session.spec
        assert tier is not None and spec is not None
        workers = self._context.sessions.workers_of(session.engine)
        direct = any(worker.direct for worker in workers)
        # What a worker reads straight from the tier is not brought.
        through = {worker.spec.shard for worker in workers if worker.spec is not None and not worker.direct}
        shards = [*through] if workers else spec.shard.peers()
        prompt = lookup.root, digests, lookup.tokens, lookup.tail
        search = functools.partial(
            find_and_bring, pool, tier, spec, shards, prompt, found, session.engine, blocks=blocks, direct=direct
        )
        find = functools.partial(self._find, session, lookup, digests, heard, search, following=following)
        covering = None if direct else pool.covering(spec)
        pieces: set[bytes] = set()
        if covering is not None:
            there = view_of_tier(pool, tier, found, covering=covering)
            hit = yield from search_hit(there, spec, *prompt, blocks)
            above = lookup.root, digests
            pieces = yield from bring_pieces(pool, tier, spec, covering, above, hit, found, session.engine)
        if not pieces:
            yield from find(reason=reason)
            return
        # What has come by then counts; what comes later, for the next lookup of the prompt, while the lease lasts.
        owner = lease_owner(session.engine, lookup.request)
        come_by = heard + tier.settings.lookup_timeout_ms / 1e3 if until is None else until
        lease_until = lookup.lease_ms / 1e3 + (time.monotonic() if until is None else until)
        session.leases[lookup.request] = lease_until
        incoming = self._context.driver.incoming
        incoming.lease(pieces, owner, lease_until)
        resets = session.resets

        def go_on() -> None:
            if session.resets == resets:
                lost = 0 if until is None else pool.lookup([*pieces]).count(False)
                late = f"{lost} of {len(pieces)} objects of another size did not come" if lost else ""
                self._go_on(session.number, lookup, find(reason=reason or late))
            else:
                self._context.send(session, wire.Found(lookup.id, 0, []))

        incoming.when_come(pieces, come_by, go_on)

    def _find(
        self,
        session: ClientSession,
        message: wire.Lookup,
        digests: list[bytes],
        heard: float,
        search: Callable[[], Search],
        *,
        following: bool = False,
        reason: str = "",
    ) -> Work:
        """Search, lease and answer. What leaves the pool between two slices is searched for again."""
        pool, resets = self._context.pool, session.resets
        owner = lookup_owner(session.engine, message.request, session.number, message.id)
        for _ in range(MOST_SEARCHES):
            before = pool.departures
            hit = yield from search()
            until = time.monotonic() + message.lease_ms / 1e3
            places = yield from self._lease(session, message, digests, hit, owner, until)
            # With a store behind the arena, the step that loads the hit brings back what leaves the arena now.
            if self._context.tier is not None or pool.departures == before:
                break
        if session.resets != resets:  # these are keys of weights that were replaced meanwhile
            pool.release(owner)
            self._context.send(session, wire.Found(message.id, 0, []))
            return
        plan = self._plan(session, message, owner) if places else 0
        if not plan:
            pool.hand_over(owner, lease_owner(session.engine, message.request), until)
        self._found(session, message, hit, heard, plan=plan, places=places, following=following, reason=reason)

    def _lease(
        self,
        session: ClientSession,
        message: wire.Lookup,
        digests: list[bytes],
        hit: HitLength,
        owner: Owner,
        until: float,
    ) -> Generator[None, None, bytes]:
        """Pin what is here of a hit; the places of its objects, empty where no load of it could do with those alone.

        :param owner: has the pins, until `until` (monotonic seconds).
        """
        assert session.spec is not None
        spec = session.spec if hit.drafts else session.spec.own
        if not (hit.tokens or hit.tails):
            return b""
        pool, tier, incoming = self._context.pool, self._context.tier, self._context.driver.incoming
        session.leases[message.request] = until
        coming = lease_owner(session.engine, message.request)
        packed: list[bytes] = []
        for keys in hit_keys(spec, digests, hit):
            packed.append(pool.lease(keys, owner, until))
            if tier is not None:
                incoming.lease(keys, coming, until)
            yield
        # A plan's columns are the shards of the whole spec.
        if len(spec.shard.peers()) != len(session.spec.shard.peers()):
            return b""
        places = unpack_places(told := b"".join(packed), spec)
        assert places is not None
        first = len(places) - len(hit.tails)
        ends = ((tokens, first + tail if tail >= 0 else -1) for tokens, tail in hit.ends(spec, message.tokens))
        return told if any(is_placed(spec, places, tokens, row) for tokens, row in ends) else b""

    def _plan(self, session: ClientSession, message: wire.Lookup, owner: Owner) -> int:
        """Make what `owner` pins a plan's: its number; 0: no worker could use one."""
        context = self._context
        workers = context.sessions.workers_of(session.engine)
        if not workers or any(worker.direct for worker in workers):
            return 0
        pinned = context.pool.pinned_by(owner) * PINNED_BYTES
        try:
            charge = session.account.charge(f"request {message.request!r}: the plan of a hit", pinned)
        except Refused:
            return 0  # what it has hit is leased all the same
        numbers = [worker.number for worker in workers]
        return context.plans.keep(session, message.request, numbers, owner, charge)

    def _found(
        self,
        session: ClientSession,
        message: wire.Lookup,
        hit: HitLength,
        heard: float,
        *,
        plan: int,
        places: bytes,
        following: bool,
        reason: str,
    ) -> None:
        context = self._context
        told = msgspec.structs.replace(_found(message.id, hit), following=following, reason=reason)
        if plan:
            told = msgspec.structs.replace(told, plan=plan, incarnation=context.incarnation, places=places)
        context.send(session, told)
        assert session.spec is not None
        tokens = hit.surely(session.spec, message.tokens)
        self._context.metrics.lookup(session.labels, tokens, message.tokens - tokens, time.monotonic() - heard)
        session.figures.lookup_tokens += message.tokens
        session.figures.hit_tokens += tokens


def _found(number: int, hit: HitLength) -> wire.Found:
    tails = [wire.TailHit(tail.chunk, tail.tokens, tail.digest, tail.shared) for tail in hit.tails]
    return wire.Found(number, hit.tokens, tails, drafts=hit.drafts)

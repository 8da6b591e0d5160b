"""Lookups that follow a hand-off: answered once it is open, with a hit on what is stored and on what is still to be.

Where it has failed, is over, or nobody opens it in time, the lookup is one of what is stored, as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Protocol

from layerflow.errors import ProtocolError
from layerflow.hits import HitLength, search_hit
from layerflow.keys import covered_by
from layerflow.pool.base import Pool
from layerflow.server.account import Charge
from layerflow.server.clients import ClientSession, Work
from layerflow.server.handlers.asked import Asked, kept_bytes, read_lookup
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus, model_mismatch
from layerflow.server.search import LookupView
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire

Search = Generator[None, None, HitLength]


def view_of_handoff(pool: Pool, handoff: Handoff) -> LookupView:
    """What is stored, and what a hand-off is still to store, as one."""
    return LookupView(pool, lambda keys: [key in handoff.pending for key in keys], handoff.partial)


def view_of_saves(context: ServerContext, engine: str, used: set[tuple[int, int]]) -> LookupView:
    """What is stored, and what other engines are storing now, as one.

    :param engine: who asks.
    :param used: is given the steps that store what is found so.
    """

    def saved(key: bytes) -> bool:
        match context.pool.writer(key):
            case ("step", int(session), int(step)):
                saver = context.sessions.get(session)
                if saver is not None and not saver.silent and saver.engine != engine:
                    used.add((session, step))
                    return True
        return False

    return LookupView(context.pool, lambda keys: [saved(key) for key in keys])


class Answers(Protocol):
    """What :class:`layerflow.server.handlers.lookups.Lookups` does for a lookup that has waited."""

    def stored(self, session: ClientSession, asked: Asked, reason: str) -> Work:
        """Answer with what is stored; `reason`: why the hand-off is not followed."""
        ...

    def followed(self, session: ClientSession, asked: Asked, search: Callable[[], Search]) -> Work:
        """Answer with a hit of a hand-off."""
        ...


class FollowLookups:
    """Lookups with a hand-off.

    :param go: goes on with one later, in its client's turn.
    """

    def __init__(self, context: ServerContext, answers: Answers, go: Callable[[int, wire.Lookup, Work], None]) -> None:
        self._context = context
        self._answers = answers
        self._go = go

    def look_up(self, session: ClientSession, message: wire.Lookup) -> Work:
        """Answer it, now or once the hand-off is more than announced; by ``follow_ms`` at the latest."""
        most_ms = int(self._context.settings().max_deadline_s * 1e3)
        if not 0 < message.follow_ms <= most_ms:
            raise ProtocolError(
                f"request {message.request!r}: follow_ms must be 1 to {most_ms}, which is server.max_deadline_s"
            )
        until = time.monotonic() + message.follow_ms / 1e3
        known = self._context.handoffs.get(message.handoff)
        if known is None or known.status is HandoffStatus.ANNOUNCED:
            # Its digests are read when there is something to look up.
            charge = session.account.charge(_waiting(message), kept_bytes(message))
            self._wait(session, message, until, charge)
            return
        yield from self._again(session, message, until)

    def look_up_unasked(self, session: ClientSession, asked: Asked) -> Work:
        """A lookup that may wait for what other engines are storing, where that is quicker than computing it.

        Computing so many tokens of a prompt takes at least their share of what the prompt takes, which its engine has
        told. Waiting takes as long as the steps that store them need at their pace so far.
        """
        message, spec, pool = asked.message, session.spec, self._context.pool
        assert spec is not None
        prompt = message.root, asked.digests, message.tokens, message.tail
        used: set[tuple[int, int]] = set()
        view = view_of_saves(self._context, session.engine, used)
        coming = yield from search_hit(view, spec, *prompt, asked.blocks)
        if used:
            here = yield from search_hit(pool, spec, *prompt, asked.blocks)
            more = _tokens(spec, message, coming) - _tokens(spec, message, here)
            now = time.monotonic()
            waits = [self._context.driver.expected(step, now) for step in used]
            compute_s = message.follow_ms / 1e3 * more / max(1, message.tokens)
            if more > 0 and all(wait is not None and wait < compute_s for wait in waits):
                self._context.driver.follows.allow(session.engine, message.request, now)
                yield from self._answers.followed(session, asked, lambda: search_hit(view, spec, *prompt, asked.blocks))
                return
        yield from self._answers.stored(session, asked, "")

    def _answer(self, session: ClientSession, asked: Asked, until: float, told: Handoff | None = None) -> Work:
        """:param told: the hand-off that was waited for; None = it is looked for by its name."""
        spec, message = session.spec, asked.message
        assert spec is not None
        now = time.monotonic()
        # Counted before anything is kept: a name that is announced is.
        charge = session.account.charge(_waiting(message), kept_bytes(message), always=now >= until)
        handoff = told or self._context.handoffs.announce(message.handoff, until)
        why = model_mismatch(spec, handoff.spec) if handoff.status.readable and handoff.spec is not None else ""
        opened = handoff.status is HandoffStatus.OPEN and not why
        if handoff.status is HandoffStatus.ANNOUNCED or (opened and not self._readable_open(session, handoff)):
            if now < until:
                self._wait(session, message, until, charge)
                return
            charge.release()
            late = f"{handoff.status.value} and not readable in time"
            yield from self._answers.stored(session, asked, late)
            return
        charge.release()
        if why or not handoff.status.readable:
            story = f"cannot be read by this engine: {why}" if why else handoff.story()
            yield from self._answers.stored(session, asked, story)
            return
        self._context.handoffs.claim(handoff, now, message.lease_ms / 1e3)
        self._context.driver.follows.allow(session.engine, message.request, now)
        view = view_of_handoff(self._context.pool, handoff)
        prompt = message.root, asked.digests, message.tokens, message.tail
        yield from self._answers.followed(session, asked, lambda: search_hit(view, spec, *prompt, asked.blocks))

    def _readable_open(self, session: ClientSession, handoff: Handoff) -> bool:
        """Can a load follow what is being stored? Of objects that cover others of its engine's, only when complete."""
        assert session.spec is not None
        spec = session.spec.own
        return handoff.parts_kept.issuperset(
            covered_by(group, shard) for group in range(len(spec.groups)) for shard in spec.shard.peers()
        )

    def _wait(self, session: ClientSession, message: wire.Lookup, until: float, charge: Charge) -> None:
        """Go on once the hand-off's state is another, or at the deadline."""
        number, resets = session.number, session.resets

        def go_on(told: Handoff) -> None:
            client = self._context.sessions.get(number)
            if client is None:
                return
            if client.resets != resets:
                # Its keys are those of weights that were replaced meanwhile.
                self._context.send(client, wire.Found(message.id, 0, [], False, REPLACED))
            else:
                self._go(number, message, self._again(client, message, until, told))

        self._context.handoffs.wait(message.handoff, until, go_on, charge)

    def _again(self, session: ClientSession, message: wire.Lookup, until: float, told: Handoff | None = None) -> Work:
        assert session.spec is not None
        asked = yield from read_lookup(session.spec, message)
        yield from self._answer(session, asked, until, told)


def _waiting(message: wire.Lookup) -> str:
    """What is charged for it."""
    return f"request {message.request!r}: a lookup that waits"


def _tokens(spec: ModelSpec, message: wire.Lookup, hit: HitLength) -> int:
    """Of the prompt, its own tail included."""
    own = [tail.chunk * spec.chunk_tokens + tail.tokens for tail in hit.tails if tail.digest == message.tail]
    return max(hit.surely(spec, message.tokens), *own) if own else hit.surely(spec, message.tokens)

"""Lookups that follow a hand-off, or what other engines store: answered with a hit on what is still to be, too."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerflow.hits import HitLength
from layerflow.keys import covered_by
from layerflow.pool.base import Pool
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.lookup_requests import LookupRequest, kept_bytes, search_prompt, unreplaced, waiting
from layerflow.server.handoffs.handoff import HandoffRecord, HandoffStatus, model_mismatch
from layerflow.server.mailboxes import in_slices
from layerflow.server.search import LookupView
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire

if TYPE_CHECKING:
    from layerflow.server.clients import ClientSession


def view_of_handoff(pool: Pool, handoff: HandoffRecord, given_up: Callable[[bytes], bool]) -> LookupView:
    """What is stored, and what a hand-off is still to store, as one.

    :param given_up: is it an object that no step may save now? See :meth:`IncomingSaves.given_up`.
    """
    return LookupView(
        pool, lambda keys: [key in handoff.pending and not given_up(key) for key in keys], handoff.partial
    )


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


async def outlast(
    context: ServerContext,
    session: ClientSession,
    message: wire.Lookup,
    pending: Callable[[HandoffRecord], bool],
    until: float,
) -> HandoffRecord:
    """A lookup's hand-off once it is not `pending` any more; or as it is at `until`.

    :raises Replaced: the engine's weights were replaced meanwhile, at its next state at the latest.
    """
    resets = session.resets
    charge = functools.partial(session.account.charge, waiting(message), kept_bytes(message))
    handoff = context.handoffs.outlast(
        message.handoff, lambda handoff: session.resets == resets and pending(handoff), until, charge
    )
    return await unreplaced(session, handoff)


async def follow_handoff(
    context: ServerContext, session: ClientSession, message: wire.Lookup, until: float
) -> tuple[HandoffRecord, str]:
    """Wait for the lookup's hand-off, until it can be read or never will be; to `until` at the latest.

    :returns: the hand-off, claimed; why it is not followed, else empty.
    """
    spec = session.spec
    assert spec is not None

    def pending(handoff: HandoffRecord) -> bool:
        return handoff.status is HandoffStatus.ANNOUNCED or (
            handoff.status is HandoffStatus.OPEN and not _mismatch(spec, handoff) and not _can_follow(spec, handoff)
        )

    handoff = await outlast(context, session, message, pending, until)
    if pending(handoff):
        return handoff, f"{handoff.status.value} and not readable in time"
    if why := _mismatch(spec, handoff):
        return handoff, f"cannot be read by this engine: {why}"
    if not handoff.status.readable:
        return handoff, handoff.story()
    now = time.monotonic()
    context.handoffs.claim(handoff, now, message.lease_ms / 1e3)
    context.driver.follows.allow(session.engine, message.request, now)
    return handoff, ""


def _mismatch(spec: ModelSpec, handoff: HandoffRecord) -> str:
    """Why an engine of this spec cannot read it; empty = it can, or nobody knows yet."""
    return model_mismatch(spec, handoff.spec) if handoff.status.readable and handoff.spec is not None else ""


def _can_follow(spec: ModelSpec, handoff: HandoffRecord) -> bool:
    """Whether loads can take what is being stored. Objects that cover others of the engine's they can when complete."""
    spec = spec.own
    parts = (covered_by(group, shard) for group in range(len(spec.groups)) for shard in spec.shard.peers())
    return handoff.parts_held.issuperset(parts)


async def follow_saves(context: ServerContext, session: ClientSession, asked: LookupRequest) -> LookupView | None:
    """What a lookup may wait for that other engines are storing; None = waiting is not quicker than computing.

    Computing so many tokens of a prompt takes at least their share of what the prompt takes, which its engine has told.
    Waiting takes as long as the steps that store them need at their pace so far.
    """
    message, spec, pool = asked.message, session.spec, context.pool
    assert spec is not None
    used: set[tuple[int, int]] = set()
    view = view_of_saves(context, session.engine, used)
    coming = await in_slices(search_prompt(view, spec, asked))
    if not used:
        return None
    here = await in_slices(search_prompt(pool, spec, asked))
    more = _tokens(spec, message, coming) - _tokens(spec, message, here)
    now = time.monotonic()
    waits = [context.driver.expected(step, now) for step in used]
    compute_s = message.follow_ms / 1e3 * more / max(1, message.tokens)
    if more <= 0 or any(wait is None or wait >= compute_s for wait in waits):
        return None
    context.driver.follows.allow(session.engine, message.request, now)
    return view


def _tokens(spec: ModelSpec, message: wire.Lookup, hit: HitLength) -> int:
    """Return a hit's tokens, the prompt's own partial chunk included."""
    tails = [tail.chunk * spec.chunk_tokens + tail.tokens for tail in hit.tails if tail.digest == message.tail]
    return max(hit.surely(spec, message.tokens), *tails) if tails else hit.surely(spec, message.tokens)

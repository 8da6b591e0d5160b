"""Lookups that follow a hand-off which other servers keep: asked of these, which answer once it is open."""

from __future__ import annotations

import time
from collections.abc import Sequence

from layerflow.errors import LayerflowError
from layerflow.keys import DIGEST_BYTES
from layerflow.server.clients import ClientSession
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.following import outlast
from layerflow.server.handlers.lookup_requests import asking_bytes, read_digests, unreplaced, waiting
from layerflow.server.handoffs.handoff import HandoffRecord, HandoffStatus
from layerflow.server.mailboxes import Answer, next_turn
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.questions import PeerAnswer
from layerflow.server.search import KEPT_KEY_BYTES, prompt_keys, with_overlapping_keys
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire

DIGESTS_PER_SLICE = 64
"""Chunks whose objects are looked for before another client may get its turn."""


async def ask_servers(
    context: ServerContext, session: ClientSession, message: wire.Lookup, until: float
) -> PeerAnswer | str:
    """What the servers that a lookup names lend of its hand-off, by `until`; or why it is not followed."""
    peers = context.peers
    if peers is None or peers.reading is None:
        return "this server reads from no other: set peers.attach or peers.learn"
    try:
        servers = _servers(context, message)
    except LayerflowError as error:
        return str(error)
    if len(servers) < len(set(message.servers)):
        # This server keeps a part itself: the others are asked once all of it is stored.
        handoff = await _part_here(context, session, message, until)
        if handoff.status is not HandoffStatus.COMPLETE:
            return handoff.story()
        servers = _servers(context, message)  # one that nobody had asked for meanwhile may have been left
    return await _ask(context, session, message, servers, until)


def _servers(context: ServerContext, message: wire.Lookup) -> list[PeerAttachment]:
    """The other servers that it names, attached to.

    :raises LayerflowError: one of them cannot be.
    """
    peers = context.peers
    assert peers is not None
    return [peers.learn(address) for address in dict.fromkeys(message.servers) if not peers.is_own(address)]


async def _part_here(
    context: ServerContext, session: ClientSession, message: wire.Lookup, until: float
) -> HandoffRecord:
    """This server's part of the hand-off, claimed once it is complete; or as it is at its end, or at `until`."""
    handoff = await outlast(context, session, message, _is_coming, until)
    if handoff.status is HandoffStatus.COMPLETE:
        context.handoffs.claim(handoff, time.monotonic(), message.lease_ms / 1e3)
    return handoff


def _is_coming(handoff: HandoffRecord) -> bool:
    return handoff.status in (HandoffStatus.ANNOUNCED, HandoffStatus.OPEN)


async def _ask(
    context: ServerContext,
    session: ClientSession,
    message: wire.Lookup,
    servers: Sequence[PeerAttachment],
    until: float,
) -> PeerAnswer:
    """What these lend of it. They are asked again where the engine's workers run in a size that was unknown before.

    Between the questions the keys are kept that were asked for, and not the prompt.
    """
    spec, peers = session.spec, context.peers
    assert spec is not None and peers is not None and peers.reading is not None
    asked: set[bytes] = set()
    answer: PeerAnswer | None = None
    with session.account.charge(waiting(message), _asking_bytes(spec, message)) as charge:
        while (more := await _lacking(context, session, message, asked)) or answer is None:
            asked.update(more)
            told = Answer[PeerAnswer](charge)
            forget = peers.reading.ask(servers, more, message.handoff, told.tell, until)
            try:
                fresh = await unreplaced(session, told)
            except GeneratorExit:
                forget()
                raise
            answer = answer.joined(fresh) if answer is not None else fresh
    if not (answer.found or answer.reason) and (why := peers.reading.difference(servers, spec.name)):
        return PeerAnswer(frozenset(), reason=f"cannot be read by this engine: {why}")
    return answer


def _asking_bytes(spec: ModelSpec, message: wire.Lookup) -> int:
    """What a lookup keeps that asks other servers for its prompt; its search behind that takes less."""
    most = (len(message.digests) // DIGEST_BYTES) * len(spec.groups) * len(spec.shard.peers())
    return asking_bytes(message) + most * KEPT_KEY_BYTES


async def _lacking(
    context: ServerContext, session: ClientSession, message: wire.Lookup, asked: set[bytes]
) -> list[bytes]:
    """What is not here of the prompt, and what may stand in for it, of all sizes that are known by now.

    :param asked: keys that are left out.
    """
    spec, pool = session.spec, context.pool
    assert spec is not None
    digests = await read_digests(message)
    digests = [*digests, message.tail] if message.tail else digests
    lacking: dict[bytes, None] = {}
    for start in range(0, len(digests), DIGESTS_PER_SLICE):
        keys = prompt_keys(spec, digests[start : start + DIGESTS_PER_SLICE])
        missing = [key for key, here in zip(keys, pool.lookup(keys), strict=True) if not here]
        lacking |= dict.fromkeys(key for key in with_overlapping_keys(pool.covering(spec), missing) if key not in asked)
        await next_turn()
    return list(lacking)

"""Hand-offs as clients speak of them: opened, ended, released, watched; and parts kept for other servers."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.server.account import Account, Refused
from layerflow.server.clients import ClientSession, Reader
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handoffs.handoff import HandoffStatus, Prompt, distinct
from layerflow.server.mailboxes import Answer, in_slices
from layerflow.wire import codec
from layerflow.wire import messages as wire

ENDS = (HandoffStatus.COMPLETE, HandoffStatus.FAILED, HandoffStatus.REVOKED, HandoffStatus.RELEASED)
OBJECT_BYTES = 512
"""What the server's records of one object that a hand-off keeps take, in bytes."""
SOON_S = 0.001
"""A deadline so near has come: timers keep it no better."""
ALIGNED = "this server keeps no partial chunk, and the prompt has no full one"


Opening = wire.OpenHandoff | wire.PeerOpenHandoff


def no_worker(engine: str) -> str:
    """Why nothing is kept of this engine's prompts."""
    return f"no worker of engine {engine!r} is attached to this server"


async def open_handoff(context: ServerContext, session: ClientSession, message: wire.OpenHandoff) -> None:
    """Keep room for what a hit of the prompt needs, and pin what is stored; here, and at the servers it names."""
    if session.spec is None:
        raise Refused("not_attached", "attach a spec before opening a hand-off")
    name, peers = message.handoff, context.peers
    others, why = [], ""
    try:
        addresses = [each for each in dict.fromkeys(message.servers) if peers is None or not peers.is_own(each)]
        others = [peers.learn(each) for each in addresses] if peers is not None else []
    except LayerflowError as error:
        why = str(error)
    if message.servers and peers is None:
        why = f"this server reaches no other, and not {message.servers[0]}: set peers.learn, or name it in peers.attach"
    tokens = 0
    if why:
        context.handoffs.refuse(name, session.engine, why)
    else:
        opener = Opener(session.engine, session.number, session.account, session.rights.key)
        tokens, why = await keep(context, session.spec.chunk_tokens, opener, message)
    handoff = context.handoffs.get(name)
    if not why and others and handoff is not None and peers is not None:
        with session.account.charge(f"hand-off {name!r}: its parts at other servers", always=True) as charge:
            answer = Answer[str](charge)
            peers.parts.open(handoff, message, others, answer.tell)
            why = await answer
    told = wire.HandoffState(message.id, name, HandoffStatus.OPEN.value, tokens)
    context.send(session, wire.HandoffState(message.id, name, "refused", 0, why) if why else told)


class Opener(NamedTuple):
    """One that opens a hand-off.

    :param engine: whose workers save it. :param number: of the session, or of the server, that ends it.
    :param key: its public key; "" = it is of this machine.
    """

    engine: str
    number: int
    account: Account
    key: str


async def keep(context: ServerContext, chunk_tokens: int, opener: Opener, message: Opening) -> tuple[int, str]:
    """Open a hand-off of what this server's workers of an engine store; where it is not opened, its readers are told.

    :returns: how many tokens of it can be read; why it is refused, else empty.
    :raises ProtocolError: nobody can mean this.
    """
    if not message.handoff:
        raise ProtocolError("a hand-off needs a name")
    try:
        return await _keep(context, chunk_tokens, opener, message)
    except LayerflowError as error:
        context.handoffs.refuse(message.handoff, opener.engine, str(error))
        raise


async def _keep(context: ServerContext, chunk_tokens: int, opener: Opener, message: Opening) -> tuple[int, str]:
    name, engine = message.handoff, opener.engine
    chunks, rest = divmod(message.tokens, chunk_tokens)
    if (
        message.tokens < 1
        or len(message.digests) != chunks * DIGEST_BYTES
        or len(message.root) != DIGEST_BYTES
        or len(message.tail) != (DIGEST_BYTES if rest else 0)
    ):
        raise ProtocolError(
            f"hand-off {name!r}: {len(message.digests)} bytes of digests, a root of {len(message.root)} and a tail of "
            f"{len(message.tail)} bytes for {message.tokens} tokens; {chunks} digests and {DIGEST_BYTES} bytes each "
            "belong, and no tail where the chunks leave nothing"
        )
    limits = context.settings()
    most_ms = limits.max_deadline_s * 1e3
    if not (0 <= message.lease_ms <= most_ms and 0 < message.timeout_ms <= most_ms):
        raise ProtocolError(
            f"hand-off {name!r}: lease_ms and timeout_ms must be at most {most_ms:.0f}, which is server.max_deadline_s"
        )
    workers = context.sessions.workers_of(engine)
    specs = distinct(worker.spec for worker in workers if worker.spec is not None)
    tokens, tail = message.tokens, message.tail
    if rest and not context.terms().save_partial:
        tokens, tail = chunks * chunk_tokens, b""
    why = ""
    if context.draining:
        why = "the server is shutting down"
    elif not specs:
        why = no_worker(engine)
    elif any(worker.direct for worker in workers):
        why = "its workers move bytes past the arena"
    elif not tokens:
        why = ALIGNED
    if why:
        return 0, context.handoffs.refuse(name, engine, why)
    asked_for = (chunks + 1) * len(specs[0].groups) * len(specs)
    if asked_for > limits.max_lookup_objects:
        raise Refused(
            "quota",
            f"hand-off {name!r}: chunks x groups x workers are {asked_for} objects, server.max_lookup_objects is "
            f"{limits.max_lookup_objects}",
        )
    digests = await in_slices(codec.split_in_slices(message.digests, f"hand-off {name!r}"))
    lease_s = message.lease_ms / 1e3 or context.pd().handoff_lease_s
    due = time.monotonic() + message.timeout_ms / 1e3
    prompt = Prompt(message.root, digests, tail, tokens)
    charge = opener.account.charge(f"hand-off {name!r}", asked_for * OBJECT_BYTES)
    why = "it was not opened"
    try:
        opening = context.handoffs.open(
            name,
            engine,
            opener.number,
            specs=specs,
            prompt=prompt,
            lease_s=lease_s,
            due=due,
            charge=charge,
            key=opener.key,
        )
        why = await in_slices(opening)
    finally:
        if why:
            charge.release()
    return (0, why) if why else (tokens, "")


def end_handoff(context: ServerContext, session: ClientSession, message: wire.EndHandoff) -> None:
    """The engine computes nothing more of it."""
    context.handoffs.end(message.handoff, session.engine, message.tokens, message.reason, time.monotonic())
    if context.peers is not None:
        context.peers.parts.ended(message, session.engine)


def release_handoff(context: ServerContext, message: wire.ReleaseHandoff) -> None:
    """Release a hand-off that nobody needs any more, here and at the servers that keep it."""
    release(context, message.handoff)
    if context.peers is not None:
        context.peers.release_handoff(message.handoff, message.servers)


def release(context: ServerContext, name: str) -> None:
    """Release what this server keeps of a hand-off, and what it would keep if it were opened within a lease."""
    context.handoffs.release(name, time.monotonic() + context.pd().handoff_lease_s)


async def watch_handoff(context: ServerContext, session: ClientSession, message: wire.WatchHandoff) -> None:
    """Tell the session of its states: the first that is not announced, and its end; or as it is at the deadline."""
    most_ms = context.settings().max_deadline_s * 1e3
    if not message.handoff or not 0 < message.deadline_ms <= most_ms:
        raise ProtocolError(
            f"hand-off {message.handoff!r}: needs a name, and deadline_ms 1 to {most_ms:.0f} (server.max_deadline_s)"
        )
    until = time.monotonic() + message.deadline_ms / 1e3
    handoffs = context.handoffs
    with session.account.charge(f"a watch of hand-off {message.handoff!r}", len(message.handoff)) as charge:
        handoff = handoffs.announce(message.handoff, until)
        if handoff.status is HandoffStatus.ANNOUNCED:
            handoff = await handoffs.changed(handoff, until, charge)
        while True:
            tokens = handoff.tokens if handoff.status.readable else 0
            told = wire.HandoffState(message.id, handoff.name, handoff.status.value, tokens, handoff.reason)
            context.send(session, told)
            if handoff.status in ENDS or time.monotonic() >= until - SOON_S:
                return
            handoff = await handoffs.changed(handoff, until, charge)


# Parts of hand-offs that this server keeps for another one, whose engine has workers here too.


async def keep_part(
    context: ServerContext,
    reader: Reader,
    message: wire.PeerOpenHandoff | wire.PeerEndHandoff | wire.PeerReleaseHandoff,
) -> None:
    """What the server of the engine's scheduler wants done.

    :raises ProtocolError: it cannot be; nothing has changed.
    """
    handoffs = context.handoffs
    match message:
        case wire.PeerOpenHandoff():
            await _open(context, reader, message)
        case wire.PeerEndHandoff():
            handoff = handoffs.get(message.handoff)
            if handoff is None or handoff.session != reader.number or handoff.engine != message.engine:
                return
            if message.reason:
                handoffs.give_up(handoff, message.reason)
            else:
                handoffs.end(message.handoff, message.engine, message.tokens, "", time.monotonic())
        case wire.PeerReleaseHandoff():
            release(context, message.handoff)


async def _open(context: ServerContext, reader: Reader, message: wire.PeerOpenHandoff) -> None:
    assert context.peers is not None and context.peers.lending is not None
    lending, handoffs = context.peers.lending, context.handoffs
    if message.incarnation != lending.incarnation:
        raise ProtocolError("this hand-off is for a server that was here before; attach again")
    specs = [worker.spec for worker in context.sessions.workers_of(message.engine) if worker.spec is not None]
    if specs:
        opener = Opener(message.engine, reader.number, reader.account, reader.rights.key)
        _, why = await keep(context, specs[0].chunk_tokens, opener, message)
    else:
        why = handoffs.refuse(message.handoff, message.engine, no_worker(message.engine))
    if why:
        lending.tell(reader, wire.PeerHandoffState(message.id, message.handoff, "refused", why))
        return
    handoff = handoffs.get(message.handoff)
    assert handoff is not None
    lending.tell(reader, wire.PeerHandoffState(message.id, handoff.name, handoff.status.value, handoff.reason))
    with reader.account.charge(f"a watch of hand-off {message.handoff!r}", always=True) as charge:
        while handoff.status is HandoffStatus.COMPLETE or handoff.status not in ENDS:
            handoff = await handoffs.changed(handoff, math.inf, charge)
            lending.tell(reader, wire.PeerHandoffState(message.id, handoff.name, handoff.status.value, handoff.reason))

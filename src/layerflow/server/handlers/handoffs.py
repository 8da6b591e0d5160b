"""Hand-offs as clients speak of them: opened, ended, released and watched."""

from __future__ import annotations

import asyncio
import time

from layerflow.errors import ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.handlers.context import Refused, ServerContext
from layerflow.server.handoffs.contents import distinct, handoff_objects
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.wire import codec
from layerflow.wire import messages as wire

ENDS = (HandoffStatus.COMPLETE, HandoffStatus.FAILED, HandoffStatus.REVOKED, HandoffStatus.RELEASED)
ALIGNED = "this server keeps no partial chunk, and the prompt has no full one"


def open_handoff(context: ServerContext, session: ClientSession, message: wire.OpenHandoff) -> None:
    """Keep room for what a hit of the prompt needs, and pin what is stored."""
    spec, name = session.spec, message.handoff
    if spec is None:
        raise Refused("not_attached", "attach a spec before opening a hand-off")
    if not name:
        raise ProtocolError("a hand-off needs a name")
    digests = codec.split_digests(message.digests, f"hand-off {name!r}")
    chunks, rest = divmod(message.tokens, spec.chunk_tokens)
    if (
        message.tokens < 1
        or len(digests) != chunks
        or len(message.root) != DIGEST_BYTES
        or len(message.tail) != (DIGEST_BYTES if rest else 0)
    ):
        raise ProtocolError(
            f"hand-off {name!r}: {len(digests)} digests, a root of {len(message.root)} and a tail of "
            f"{len(message.tail)} bytes for {message.tokens} tokens; {chunks} digests and {DIGEST_BYTES} bytes each "
            "belong, and no tail where the chunks leave nothing"
        )
    limits = context.settings()
    most_ms = limits.max_deadline_s * 1e3
    if not (0 <= message.lease_ms <= most_ms and 0 < message.timeout_ms <= most_ms):
        raise ProtocolError(
            f"hand-off {name!r}: lease_ms and timeout_ms must be at most {most_ms:.0f}, which is server.max_deadline_s"
        )
    workers = context.sessions.workers_of(session.engine)
    specs = distinct(worker.spec for worker in workers if worker.spec is not None)
    now = time.monotonic()
    tokens, tail = message.tokens, message.tail
    if rest and not context.terms().save_partial:
        tokens, tail = chunks * spec.chunk_tokens, b""
    why = ""
    if context.draining:
        why = "the server is shutting down"
    elif not specs:
        why = f"no worker of engine {session.engine!r} is attached to this server"
    elif any(worker.direct for worker in workers):
        why = "its workers move bytes past the arena"
    elif not tokens:
        why = ALIGNED
    asked_for = (chunks + 1) * len(spec.groups) * max(1, len(specs))
    if asked_for > limits.max_lookup_objects:
        raise Refused(
            "quota",
            f"hand-off {name!r}: chunks x groups x workers are {asked_for} objects, server.max_lookup_objects is "
            f"{limits.max_lookup_objects}",
        )
    if not why:
        objects = handoff_objects(specs, message.root, digests, tail, tokens)
        lease_s = message.lease_ms / 1e3 or context.pd().handoff_lease_s
        due = now + message.timeout_ms / 1e3
        why = context.handoffs.open(name, session.engine, session.number, specs[0], tokens, objects, lease_s, due, now)
    told = wire.HandoffState(message.id, name, "refused", 0, why)
    if not why:
        told = wire.HandoffState(message.id, name, HandoffStatus.OPEN.value, tokens)
    context.send(session, told)


def end_handoff(context: ServerContext, session: ClientSession, message: wire.EndHandoff) -> None:
    """The engine computes nothing more of it."""
    context.handoffs.end(message.handoff, session.engine, message.tokens, message.reason, time.monotonic())


def watch_handoff(context: ServerContext, session: ClientSession, message: wire.WatchHandoff) -> None:
    """Tell the session of its states: the first that is not announced, and its end; or as it is at the deadline."""
    most_ms = context.settings().max_deadline_s * 1e3
    if not message.handoff or not 0 < message.deadline_ms <= most_ms:
        raise ProtocolError(
            f"hand-off {message.handoff!r}: needs a name, and deadline_ms 1 to {most_ms:.0f} (server.max_deadline_s)"
        )
    number, handoffs = session.number, context.handoffs
    until = time.monotonic() + message.deadline_ms / 1e3
    handoff = handoffs.announce(message.handoff, until)

    def tell(told: Handoff) -> None:
        client = context.sessions.get(number)
        if client is not None:
            tokens = told.tokens if told.status.readable else 0
            context.send(client, wire.HandoffState(message.id, told.name, told.status.value, tokens, told.reason))

    def changed(told: Handoff) -> None:
        tell(told)
        if told.status in ENDS:
            timer.cancel()
        else:
            handoffs.watch(told, changed)

    def expired() -> None:
        handoffs.unwatch(handoff, changed)
        if handoff.status not in ENDS:
            tell(handoff)

    timer = asyncio.get_running_loop().call_later(message.deadline_ms / 1e3, expired)
    if handoff.status is HandoffStatus.ANNOUNCED:
        handoffs.watch(handoff, changed)
    else:
        changed(handoff)

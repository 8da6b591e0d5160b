"""Parts of hand-offs that this server keeps for another one, whose engine has workers here too."""

from __future__ import annotations

import time

from layerflow.errors import ProtocolError
from layerflow.server.clients.turns import Work
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.handoffs import ENDS, Opener, keep, release
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.peers.lending.readers import Reader
from layerflow.wire import messages as wire


def keep_part(
    context: ServerContext,
    reader: Reader,
    message: wire.PeerOpenHandoff | wire.PeerEndHandoff | wire.PeerReleaseHandoff,
) -> Work:
    """What the server of the engine's scheduler wants done.

    :raises ProtocolError: it cannot be; nothing has changed.
    """
    handoffs = context.handoffs
    match message:
        case wire.PeerOpenHandoff():
            yield from _open(context, reader, message)
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


def _open(context: ServerContext, reader: Reader, message: wire.PeerOpenHandoff) -> Work:
    assert context.peers is not None and context.peers.lending is not None
    lending, handoffs = context.peers.lending, context.handoffs
    if message.incarnation != lending.incarnation:
        raise ProtocolError("this hand-off is for a server that was here before; attach again")
    specs = [worker.spec for worker in context.sessions.workers_of(message.engine) if worker.spec is not None]
    why = f"no worker of engine {message.engine!r} is attached to this server"
    if specs:
        opener = Opener(message.engine, reader.number, reader.account)
        _, why = yield from keep(context, specs[0].chunk_tokens, opener, message)
    if why:
        lending.tell(reader, wire.PeerHandoffState(message.id, message.handoff, "refused", why))
        return

    def changed(told: Handoff) -> None:
        lending.tell(reader, wire.PeerHandoffState(message.id, told.name, told.status.value, told.reason))
        if told.status is HandoffStatus.COMPLETE or told.status not in ENDS:
            handoffs.watch(told, changed)

    handoff = handoffs.get(message.handoff)
    assert handoff is not None
    changed(handoff)

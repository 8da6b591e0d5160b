"""Lookups that follow a hand-off which other servers keep: asked of these, which answer once it is open.

Without them, in time or at all, the lookup is one of what is stored here, as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.following import Asked
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handlers.turns import Work
from layerflow.server.lookup.lookup import prompt_keys
from layerflow.server.peers.reading.questions import PeerAnswer
from layerflow.wire import messages as wire


class RemoteAnswers(Protocol):
    """What :class:`layerflow.server.handlers.lookups.Lookups` does for a lookup that has waited."""

    def stored(self, session: ClientSession, asked: Asked, reason: str) -> Work:
        """Answer with what is stored; `reason`: why the hand-off is not followed."""
        ...

    def lent(self, session: ClientSession, asked: Asked, answer: PeerAnswer) -> Work:
        """Answer with a hit of what is here and what peers lend."""
        ...


class RemoteLookups:
    """Lookups with a hand-off and servers.

    :param go: goes on with one later, in its client's turn.
    """

    def __init__(
        self, context: ServerContext, answers: RemoteAnswers, go: Callable[[int, wire.Lookup, Work], None]
    ) -> None:
        self._context, self._answers, self._go = context, answers, go

    def look_up(self, session: ClientSession, asked: Asked) -> Work:
        """Attach to the servers, ask them, and go on when they have answered."""
        message, spec, peers = asked.message, session.spec, self._context.peers
        assert spec is not None
        most_ms = int(self._context.settings().max_deadline_s * 1e3)
        if not 0 < message.follow_ms <= most_ms:
            raise ProtocolError(
                f"request {message.request!r}: follow_ms must be 1 to {most_ms}, which is server.max_deadline_s"
            )
        if peers is None or peers.source is None:
            why = "this server reads from no other: set peers.attach or peers.learn"
            yield from self._answers.stored(session, asked, why)
            return
        try:
            servers = [peers.learn(address) for address in dict.fromkeys(message.servers)]
        except LayerflowError as error:
            yield from self._answers.stored(session, asked, str(error))
            return
        every = prompt_keys(spec, [*asked.digests, message.tail] if message.tail else asked.digests)
        keys = [key for key, here in zip(every, self._context.pool.lookup(every), strict=True) if not here]
        number, resets = session.number, session.resets

        def answered(answer: PeerAnswer) -> None:
            client = self._context.sessions.get(number)
            if client is not None and client.resets != resets:
                # Its keys are those of weights that were replaced meanwhile.
                self._context.send(client, wire.Found(message.id, 0, [], False, REPLACED))
            elif client is not None:
                self._go(number, message, self._answers.lent(client, asked, answer))

        until = time.monotonic() + message.follow_ms / 1e3
        peers.source.ask_handoff(servers, keys, message.handoff, answered, until)

"""Lookups that follow a hand-off which other servers keep: asked of these, which answer once it is open.

Without them, in time or at all, the lookup is one of what is stored here, as any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.handlers.asked import Asked
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handlers.turns import Work
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.lookup.lookup import prompt_keys, with_alternatives
from layerflow.server.peers.reading.attachment import Attachment
from layerflow.server.peers.reading.questions import PeerAnswer
from layerflow.wire import messages as wire


class RemoteAnswers(Protocol):
    """What :class:`layerflow.server.handlers.lookups.Lookups` does for a lookup that has waited."""

    def stored(self, session: ClientSession, asked: Asked, reason: str) -> Work:
        """Answer with what is stored; `reason`: why the hand-off is not followed."""
        ...

    def lent(self, session: ClientSession, asked: Asked, answer: PeerAnswer, until: float) -> Work:
        """Answer with a hit of what is here and what peers lend; objects of other sizes are waited for, to `until`."""
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
        if peers is None or peers.reading is None:
            why = "this server reads from no other: set peers.attach or peers.learn"
            yield from self._answers.stored(session, asked, why)
            return
        until = time.monotonic() + message.follow_ms / 1e3
        addresses = [address for address in dict.fromkeys(message.servers) if not peers.is_own(address)]
        try:
            servers = [peers.learn(address) for address in addresses]
        except LayerflowError as error:
            yield from self._answers.stored(session, asked, str(error))
            return
        if len(addresses) == len(set(message.servers)):
            self._ask(session, asked, servers, until)
        else:
            self._wait_own(session, asked, servers, until)

    def _wait_own(self, session: ClientSession, asked: Asked, servers: Sequence[Attachment], until: float) -> None:
        """This server keeps a part itself: the others are asked once all of it is stored."""
        handoffs, number, resets = self._context.handoffs, session.number, session.resets

        def changed(told: Handoff) -> None:
            client = self._context.sessions.get(number)
            waits = told.status in (HandoffStatus.ANNOUNCED, HandoffStatus.OPEN) and time.monotonic() < until
            if waits and client is not None:
                handoffs.watch(told, changed)
                return
            timer.cancel()
            handoffs.unwatch(told, changed)
            if client is None:
                return
            if client.resets != resets:
                self._context.send(client, wire.Found(asked.message.id, 0, [], False, REPLACED))
            elif told.status is HandoffStatus.COMPLETE:
                handoffs.claim(told, time.monotonic(), asked.message.lease_ms / 1e3)
                self._ask(client, asked, servers, until)
            else:
                self._go(number, asked.message, self._answers.stored(client, asked, told.story()))

        handoff = handoffs.announce(asked.message.handoff, until)
        timer = asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), changed, handoff)
        changed(handoff)

    def _ask(self, session: ClientSession, asked: Asked, servers: Sequence[Attachment], until: float) -> None:
        """What do these lend of it?"""
        message, spec, peers = asked.message, session.spec, self._context.peers
        assert spec is not None and peers is not None and peers.reading is not None
        own = prompt_keys(spec, [*asked.digests, message.tail] if message.tail else asked.digests)
        pool = self._context.pool
        number, resets, reading = session.number, session.resets, peers.reading

        def wanted() -> list[bytes]:
            """What is not here of the prompt, and what may stand in for it, of all sizes that are known by now."""
            missing = [key for key, here in zip(own, pool.lookup(own), strict=True) if not here]
            return with_alternatives(pool.covering(spec), missing)

        def answered(answer: PeerAnswer) -> None:
            client = self._context.sessions.get(number)
            if client is not None and (more := [key for key in wanted() if key not in known]):
                # Its workers run in a size of which nothing was known when they were asked.
                known.update(more)
                reading.ask(servers, more, message.handoff, lambda late: answered(answer.joined(late)), until)
            elif client is not None and client.resets != resets:
                # Its keys are those of weights that were replaced meanwhile.
                self._context.send(client, wire.Found(message.id, 0, [], False, REPLACED))
            elif client is not None:
                if not (answer.found or answer.reason) and (why := reading.difference(servers, spec.name)):
                    answer = PeerAnswer(frozenset(), reason=f"cannot be read by this engine: {why}")
                self._go(number, message, self._answers.lent(client, asked, answer, until))

        first = wanted()
        known = set(first)
        reading.ask(servers, first, message.handoff, answered, until)

"""Lookups that follow a hand-off which other servers keep: asked of these, which answer once it is open.

Without them, in time or at all, the lookup is one of what is stored here, as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.server.clients.account import Charge
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.clients.turns import Work
from layerflow.server.handlers.asked import Asked, kept_bytes, read_lookup
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.lookup.lookup import prompt_keys, with_alternatives
from layerflow.server.peers.reading.attachment import Attachment
from layerflow.server.peers.reading.questions import PeerAnswer
from layerflow.wire import messages as wire

DIGESTS_PER_SLICE = 64
"""Chunks whose objects are looked for before another client may get its turn."""

KEPT_KEY_BYTES = 192
"""What a key takes that was asked for, in bytes, while its answer is waited for."""


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
        try:
            servers = self._servers(message)
        except LayerflowError as error:
            yield from self._answers.stored(session, asked, str(error))
            return
        if len(servers) == len(set(message.servers)):
            yield from self._ask(session, asked, servers, until)
        else:
            yield from self._own_part(session, asked, until)

    def _servers(self, message: wire.Lookup) -> list[Attachment]:
        """The other servers that it names, attached to.

        :raises LayerflowError: one of them cannot be.
        """
        peers = self._context.peers
        assert peers is not None
        return [peers.learn(address) for address in dict.fromkeys(message.servers) if not peers.is_own(address)]

    def _own_part(
        self,
        session: ClientSession,
        asked: Asked,
        until: float,
        told: Handoff | None = None,
    ) -> Work:
        """This server keeps a part itself: the others are asked once all of it is stored.

        :param told: the hand-off that was waited for; None = it is looked for by its name.
        """
        handoffs, number, resets, message = self._context.handoffs, session.number, session.resets, asked.message
        now = time.monotonic()
        charge = self._charge(session, message, kept_bytes(message), always=now >= until)
        handoff = told or handoffs.announce(message.handoff, until)
        if handoff.status in (HandoffStatus.ANNOUNCED, HandoffStatus.OPEN) and now < until:

            def changed(told: Handoff) -> None:
                client = self._context.sessions.get(number)
                if client is not None and client.resets != resets:
                    self._context.send(client, wire.Found(message.id, 0, [], False, REPLACED))
                elif client is not None:
                    self._go(number, message, self._own_part_again(client, message, until, told))

            handoffs.wait(message.handoff, until, changed, charge)
            return
        charge.release()
        if handoff.status is HandoffStatus.COMPLETE:
            handoffs.claim(handoff, now, message.lease_ms / 1e3)
            # Those that nobody has asked for while this part was waited for may have been left.
            yield from self._ask(session, asked, self._servers(message), until)
        else:
            yield from self._answers.stored(session, asked, handoff.story())

    def _own_part_again(
        self,
        session: ClientSession,
        message: wire.Lookup,
        until: float,
        told: Handoff,
    ) -> Work:
        assert session.spec is not None
        asked = yield from read_lookup(session.spec, message)
        yield from self._own_part(session, asked, until, told)

    def _charge(self, session: ClientSession, message: wire.Lookup, nbytes: int, *, always: bool = False) -> Charge:
        return session.account.charge(f"request {message.request!r}: a lookup that waits", nbytes, always=always)

    def _ask(self, session: ClientSession, asked: Asked, servers: Sequence[Attachment], until: float) -> Work:
        """What do these lend of it?"""
        spec, peers = session.spec, self._context.peers
        assert spec is not None and peers is not None and peers.reading is not None
        message, blocks = asked.message, asked.blocks
        number, resets, reading = session.number, session.resets, peers.reading
        asked_for = len(asked.digests) * len(spec.groups) * len(spec.shard.peers())
        charge = self._charge(session, message, kept_bytes(message) + asked_for * KEPT_KEY_BYTES)
        known: set[bytes] = set()
        joined: PeerAnswer | None = None

        def wanted(digests: Sequence[bytes]) -> Generator[None, None, list[bytes]]:
            """What is not here of the prompt, and what may stand in for it, of all sizes that are known by now."""
            more: list[bytes] = []
            for start in range(0, len(digests), DIGESTS_PER_SLICE):
                own = prompt_keys(spec, digests[start : start + DIGESTS_PER_SLICE])
                missing = [key for key, here in zip(own, self._context.pool.lookup(own), strict=True) if not here]
                fresh = with_alternatives(self._context.pool.covering(spec), missing)
                more += [key for key in fresh if key not in known]
                known.update(more)
                yield
            return more

        def ask(client: ClientSession, again: Asked) -> Work:
            digests = [*again.digests, message.tail] if message.tail else again.digests
            more = yield from wanted(digests)
            if more or joined is None:
                # The first time, and where its workers run in a size of which nothing was known when they were asked.
                charge.end = reading.ask(servers, more, message.handoff, answered, until)
                return
            charge.release()
            answer = joined
            if not (answer.found or answer.reason) and (why := reading.difference(servers, spec.name)):
                answer = PeerAnswer(frozenset(), reason=f"cannot be read by this engine: {why}")
            yield from self._answers.lent(client, again, answer, until)

        def answered(answer: PeerAnswer) -> None:
            nonlocal joined
            joined = answer if joined is None else joined.joined(answer)
            client = self._context.sessions.get(number)
            if client is not None and client.resets != resets:
                # Its keys are those of weights that were replaced meanwhile.
                charge.release()
                self._context.send(client, wire.Found(message.id, 0, [], False, REPLACED))
            elif client is not None:
                self._go(number, message, again(client))

        def again(client: ClientSession) -> Work:
            yield from ask(client, (yield from read_lookup(spec, message)))

        yield from ask(session, Asked(message, asked.digests, blocks))

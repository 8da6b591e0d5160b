"""Lookups that follow a hand-off which other servers keep: asked of these, which answer once it is open.

Without them, in time or at all, the lookup is one of what is stored here, as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.server.account import Charge
from layerflow.server.clients import ClientSession, Work
from layerflow.server.handlers.asked import Asked, kept_bytes, read_lookup
from layerflow.server.handlers.context import ServerContext
from layerflow.server.handlers.forget import REPLACED
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.peers.attachment import Attachment
from layerflow.server.peers.questions import PeerAnswer
from layerflow.server.search import prompt_keys, with_alternatives
from layerflow.spec import ModelSpec
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
        spec, message = session.spec, asked.message
        assert spec is not None
        asked_for = len(asked.digests) * len(spec.groups) * len(spec.shard.peers())
        charge = self._charge(session, message, kept_bytes(message) + asked_for * KEPT_KEY_BYTES)
        question = _Question(self._context, self._answers, self._go, session, message, servers, until, charge)
        yield from question.ask(session, asked)


class _Question:
    """What servers are asked for one lookup: again, where its workers run in a size of which nothing was known before.

    Between its questions it keeps the keys that were asked for, and not the prompt.
    """

    def __init__(
        self,
        context: ServerContext,
        answers: RemoteAnswers,
        go: Callable[[int, wire.Lookup, Work], None],
        session: ClientSession,
        message: wire.Lookup,
        servers: Sequence[Attachment],
        until: float,
        charge: Charge,
    ) -> None:
        self._context, self._answers, self._go = context, answers, go
        self._session, self._resets = session.number, session.resets
        self._message, self._servers, self._until, self._charge = message, servers, until, charge
        self._known: set[bytes] = set()
        self._joined: PeerAnswer | None = None

    def ask(self, client: ClientSession, asked: Asked) -> Work:
        """Ask, or answer the lookup where nothing more is to be asked for."""
        message, spec, peers = self._message, client.spec, self._context.peers
        assert spec is not None and peers is not None and peers.reading is not None
        digests = [*asked.digests, message.tail] if message.tail else asked.digests
        more = yield from self._wanted(spec, digests)
        if more or self._joined is None:
            handoff, until = message.handoff, self._until
            self._charge.on_end(peers.reading.ask(self._servers, more, handoff, self._answered, until))
            return
        self._charge.release()
        answer = self._joined
        if not (answer.found or answer.reason) and (why := peers.reading.difference(self._servers, spec.name)):
            answer = PeerAnswer(frozenset(), reason=f"cannot be read by this engine: {why}")
        yield from self._answers.lent(client, asked, answer, self._until)

    def _wanted(self, spec: ModelSpec, digests: Sequence[bytes]) -> Generator[None, None, list[bytes]]:
        """What is not here of the prompt, and what may stand in for it, of all sizes that are known by now."""
        pool, more = self._context.pool, []
        for start in range(0, len(digests), DIGESTS_PER_SLICE):
            own = prompt_keys(spec, digests[start : start + DIGESTS_PER_SLICE])
            missing = [key for key, here in zip(own, pool.lookup(own), strict=True) if not here]
            fresh = with_alternatives(pool.covering(spec), missing)
            more += [key for key in fresh if key not in self._known]
            self._known.update(more)
            yield
        return more

    def _answered(self, answer: PeerAnswer) -> None:
        self._joined = answer if self._joined is None else self._joined.joined(answer)
        client = self._context.sessions.get(self._session)
        if client is not None and client.resets != self._resets:
            # Its keys are those of weights that were replaced meanwhile.
            self._charge.release()
            self._context.send(client, wire.Found(self._message.id, 0, [], False, REPLACED))
        elif client is not None:
            self._go(self._session, self._message, self._again(client))

    def _again(self, client: ClientSession) -> Work:
        assert client.spec is not None
        yield from self.ask(client, (yield from read_lookup(client.spec, self._message)))

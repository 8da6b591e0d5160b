"""Hand-offs that other servers keep, as the server of their reader asks for them: all parts, or none."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

from layerflow.config.settings import Settings
from layerflow.server.peers.reading.attachment import Attachment, AttachmentState
from layerflow.server.peers.reading.questions import PeerAnswer
from layerflow.server.peers.reading.source import PeerSource
from layerflow.wire.messages import MAX_PEER_KEYS

ATTACH_POLL_S = 0.02
"""How often a lookup with a hand-off looks whether its server can be read from by now."""


class HandoffReading:
    """Of one server.

    :param source: its peers, and what they have lent.
    """

    def __init__(self, settings: Callable[[], Settings], source: PeerSource) -> None:
        self._settings, self._source = settings, source

    def ask(
        self,
        servers: Sequence[Attachment],
        keys: Sequence[bytes],
        handoff: str,
        then: Callable[[PeerAnswer], None],
        until: float,
    ) -> None:
        """What do these servers lend of a hand-off, stored or still to be? Answered once, by `until`.

        It is answered when all of them have, or as soon as one says that its part will never be whole. A server that is
        not attached yet is waited for, unless it turns out to be away.
        """
        waiting, joined = set(servers), PeerAnswer(frozenset())

        def heard(peer: Attachment, answer: PeerAnswer) -> None:
            nonlocal joined
            if not waiting:
                self._give_back(handoff, [peer])  # too late
                return
            waiting.discard(peer)
            joined = joined.joined(answer)
            if joined.failed and len(servers) > 1:
                self._give_back(handoff, servers)
                joined = PeerAnswer(frozenset(), False, joined.reason, failed=True)
                waiting.clear()
            if not waiting:
                then(joined)

        if not servers:
            then(joined)
        for peer in servers:
            down = peer.state is AttachmentState.DOWN
            attempts = peer.attempts + (1 if down else 0)
            self._ask_one(peer, attempts, list(keys)[:MAX_PEER_KEYS], handoff, functools.partial(heard, peer), until)

    def difference(self, servers: Sequence[Attachment], model: str) -> str:
        """The first fact in which one of these differs from the model that is read here; empty = none is known."""
        known = self._source.comparison.differences
        return next((why for peer in servers if (why := known.get(peer.target.name, {}).get(model, ""))), "")

    def release(self, name: str, servers: Sequence[Attachment]) -> None:
        """Nobody needs it any more: what is read of it is read to the end, and the rest given back.

        A server that is not attached yet is told once it is; past this server's own `pd.handoff_lease_s` no more, for a
        lease has ended the hand-off there by then.
        """
        self._give_back(name, servers)
        until = time.monotonic() + self._settings().pd.handoff_lease_s
        for peer in servers:
            self._source.releases.tell(peer, name, until)

    def _ask_one(
        self,
        peer: Attachment,
        attempts: int,
        keys: Sequence[bytes],
        handoff: str,
        then: Callable[[PeerAnswer], None],
        until: float,
    ) -> None:
        """:param attempts: to attach, after which the server is away."""
        source, now = self._source, time.monotonic()
        left = until - now
        if left <= 0:
            then(PeerAnswer(frozenset(), reason="its server cannot be read from in time", failed=True))
        elif peer.state is AttachmentState.DOWN and peer.attempts >= attempts:
            why = f"its server {peer.target.name} is away: {peer.reason}"
            then(PeerAnswer(frozenset(), reason=why, failed=True))
        elif not source.able(peer, now):
            again = functools.partial(self._ask_one, peer, attempts, keys, handoff, then, until)
            asyncio.get_running_loop().call_later(min(ATTACH_POLL_S, left), again)
        else:

            def answered(answer: PeerAnswer) -> None:
                source.watch_leases()
                then(answer)

            lease_ms = self._settings().peers.lease_ms
            source.questions.ask([peer], keys, answered, timeout_s=left, lease_ms=lease_ms, handoff=handoff)

    def _give_back(self, handoff: str, servers: Sequence[Attachment]) -> None:
        for peer in servers:
            for lease in self._source.offers.leases(peer):
                if lease.handoff == handoff:
                    lease.over = True
                    if not lease.fetches:
                        self._source.release(lease)

"""Hand-offs that other servers keep, as the server of their reader asks for them: all parts, or none."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from layerflow.config.settings import Settings
from layerflow.server.peers.attachment import AttachmentState, PeerAttachment
from layerflow.server.peers.questions import PeerAnswer, RemoteLease
from layerflow.server.peers.source import PeerSource
from layerflow.wire.messages import MAX_PEER_KEYS

GRACE_S = 5.0
"""How long an exporter or an importer may take to start anew before the lookups that wait for it are answered."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A lookup of one server.

    :param attempts: to attach, after which the server is away.
    :param since: when it was last seen that nothing but an exporter or importer is missing; monotonic seconds.
    :param timer: looks again. :param drop: the question that was asked is of no interest any more.
    """

    peer: PeerAttachment
    attempts: int
    keys: Sequence[bytes]
    handoff: str
    on_done: Callable[[PeerAnswer], None]
    until: float
    since: float
    timer: asyncio.TimerHandle | None = None
    drop: Callable[[], None] | None = None


class HandoffReading:
    """What one server reads of other servers' hand-offs.

    :param source: its peers, and what they have lent.
    """

    def __init__(self, settings: Callable[[], Settings], source: PeerSource) -> None:
        self._settings, self._source = settings, source
        self._waiting: dict[PeerAttachment, dict[_Waiter, None]] = {}
        source.on_change, source.waits_for = self._changed, self.waits_for

    def ask(
        self,
        servers: Sequence[PeerAttachment],
        keys: Sequence[bytes],
        handoff: str,
        on_done: Callable[[PeerAnswer], None],
        until: float,
    ) -> Callable[[], None]:
        """What do these servers lend of a hand-off, stored or still to be? Answered once, by `until`.

        It is answered when all of them have, or as soon as one says that its part will never be whole. A server that is
        not attached yet is waited for, unless it turns out to be away. Call what is returned where nobody waits for the
        answer any more.
        """
        waiting, joined = set(servers), PeerAnswer(frozenset())
        asked: dict[PeerAttachment, _Waiter] = {}

        def take(peer: PeerAttachment, answer: PeerAnswer) -> None:
            nonlocal joined
            if not waiting:
                self._give_back(answer.leases)  # too late
                return
            waiting.discard(peer)
            joined = joined.joined(answer)
            if joined.failed and len(servers) > 1:
                self._give_back(joined.leases)  # another lookup of the hand-off may count on what it was lent itself
                joined = PeerAnswer(frozenset(), False, joined.reason, failed=True)
                waiting.clear()
            if not waiting:
                on_done(joined)

        def cancel() -> None:
            waiting.clear()
            for waiter in asked.values():
                self._forget(waiter)
                if waiter.drop is not None:
                    waiter.drop()

        if not servers:
            on_done(joined)
        now = time.monotonic()
        for peer in servers:
            attempts = peer.attempts + (1 if peer.state is AttachmentState.DOWN else 0)
            few = list(keys)[:MAX_PEER_KEYS]
            waiter = asked[peer] = _Waiter(peer, attempts, few, handoff, functools.partial(take, peer), until, now)
            self._go_on(waiter)
        return cancel

    def difference(self, servers: Sequence[PeerAttachment], model: str) -> str:
        """The first fact in which one of these differs from the model that is read here; empty = none is known."""
        known = self._source.compatibility.differences
        return next((why for peer in servers if (why := known.get(peer.target.name, {}).get(model, ""))), "")

    def release(self, name: str, servers: Sequence[PeerAttachment]) -> None:
        """Release a hand-off: what is read of it is read to the end, and the rest given back.

        A server that is not attached yet is told once it is; past this server's own `pd.handoff_lease_s` no more, for a
        lease has ended the hand-off there by then.
        """
        leases = [lease for peer in servers for lease in self._source.offers.leases(peer)]
        self._give_back(lease for lease in leases if lease.handoff == name)
        until = time.monotonic() + self._settings().pd.handoff_lease_s
        for peer in servers:
            self._source.releases.tell(peer, name, until)

    def waits_for(self, peer: PeerAttachment) -> bool:
        """Does a lookup wait until this server can be asked?"""
        return peer in self._waiting

    def _go_on(self, waiter: _Waiter) -> None:
        """Ask, if that can be done; or say why it never can; else wait for a change."""
        source, now, peer = self._source, time.monotonic(), waiter.peer
        left = waiter.until - now
        if why := self._hopeless(waiter, now):
            waiter.on_done(PeerAnswer(frozenset(), reason=why, failed=True))
        elif not source.able(peer, now):
            self._waiting.setdefault(peer, {})[waiter] = None
            waits = [left, waiter.since + GRACE_S - now if peer.up else left, source.rests(peer, now) or left]
            waiter.timer = asyncio.get_running_loop().call_later(max(0.0, min(waits)), self._wake, waiter)
        else:
            lease_ms, handoff = self._settings().peers.lease_ms, waiter.handoff
            answered = functools.partial(self._answered, waiter.on_done)
            waiter.drop = source.questions.ask(
                [peer], waiter.keys, answered, timeout_s=left, lease_ms=lease_ms, handoff=handoff
            )

    def _answered(self, on_done: Callable[[PeerAnswer], None], answer: PeerAnswer) -> None:
        self._source.watch_leases()
        on_done(answer)

    def _hopeless(self, waiter: _Waiter, now: float) -> str:
        """Why waiting is of no use; empty = it may be."""
        source, peer = self._source, waiter.peer
        if waiter.until <= now:
            return "its server cannot be read from in time"
        if peer.state is AttachmentState.DOWN and peer.attempts >= waiter.attempts:
            return f"its server {peer.target.name} is away: {peer.reason}"
        if peer.other_link:
            return f"its server {peer.target.name} cannot be read from: {peer.unreadable}"
        if not peer.up or source.able(peer, now):
            waiter.since = now
        elif now >= waiter.since + GRACE_S and not source.rests(peer, now):
            why = peer.unreadable or "the importer of this server is not up"
            return f"its server {peer.target.name} cannot be read from: {why}"
        return ""

    def _wake(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        self._go_on(waiter)

    def _changed(self, peer: PeerAttachment | None) -> None:
        """Something about a server has changed, or about what reads from all of them (None)."""
        for each in [peer] if peer is not None else list(self._waiting):
            for waiter in list(self._waiting.get(each, ())):
                self._wake(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        mine = self._waiting.get(waiter.peer, {})
        mine.pop(waiter, None)
        if not mine:
            self._waiting.pop(waiter.peer, None)

    def _give_back(self, leases: Iterable[RemoteLease]) -> None:
        """Give these back, each once nothing of it is read any more."""
        for lease in leases:
            lease.over = True
            if not lease.fetches:
                self._source.release(lease)

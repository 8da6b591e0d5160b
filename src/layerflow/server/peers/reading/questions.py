"""What peers were asked: each question answered once, by its deadline, with what all of them lend."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from layerflow.errors import ProtocolError
from layerflow.server.peers.reading.attachment import Attachment
from layerflow.server.peers.reading.offers import Offers
from layerflow.wire import messages as wire

MOST_LATE = 16_384
"""Answers that may come too late, whose leases are given back then; the leases of older ones run out."""

log = structlog.get_logger("layerflow.server.peers")


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What peers lend of what they were asked for.

    :param open: some of it is still being stored. :param reason: why a hand-off is not followed; empty = it is.
    :param failed: the hand-off will never be whole.
    """

    found: frozenset[bytes]
    open: bool = False
    reason: str = ""
    failed: bool = False

    def joined(self, later: PeerAnswer) -> PeerAnswer:
        """With what they said when they were asked for more."""
        return PeerAnswer(
            self.found | later.found,
            self.open or later.open,
            self.reason or later.reason,
            self.failed or later.failed,
        )


@dataclass(slots=True)
class _Question:
    """:param waiting: numbers that have no answer. :param timer: None = it is over."""

    then: Callable[[PeerAnswer], None]
    handoff: str
    timer: asyncio.TimerHandle | None = None
    waiting: set[int] = field(default_factory=set)
    found: set[bytes] = field(default_factory=set)
    open: bool = False
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    question: _Question
    peer: Attachment
    keys: Sequence[bytes]
    at: float
    lease_ms: int


class PeerQuestions:
    """Those under way.

    :param offers: takes what is lent. :param numbers: of everything that peers are asked.
    """

    def __init__(self, offers: Offers, numbers: Iterator[int]) -> None:
        self._offers, self._numbers = offers, numbers
        self._asked: dict[int, _Asked] = {}
        self._late: dict[int, Attachment] = {}  # what is over and was not answered, oldest first
        self.lookups = self.keys = self.unanswered = 0

    def ask(
        self,
        peers: Sequence[Attachment],
        keys: Sequence[bytes],
        then: Callable[[PeerAnswer], None],
        *,
        timeout_s: float,
        lease_ms: int,
        handoff: str = "",
    ) -> Callable[[], None]:
        """Ask these; `then` is told once, perhaps at once. Call what is returned where nobody waits any more.

        :param handoff: also for what is still to be stored of it.
        """
        question, now, packed = _Question(then, handoff), time.monotonic(), b"".join(keys)
        wait_ms = max(1, round(timeout_s * 1e3)) if handoff else 0
        for peer in peers:
            assert peer.welcome is not None
            number, incarnation = next(self._numbers), peer.welcome.incarnation
            if peer.send(wire.PeerLookup(number, incarnation, packed, lease_ms, handoff, wait_ms)):
                question.waiting.add(number)
                self._asked[number] = _Asked(question, peer, keys, now if not handoff else now + timeout_s, lease_ms)
        self.lookups += 1
        self.keys += len(keys)
        if question.waiting:
            question.timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late, question)
        else:
            then(PeerAnswer(frozenset()))
        return functools.partial(self._drop, question)

    def waits_for(self, peer: Attachment) -> bool:
        """Is a question to this peer under way?"""
        return any(asked.peer is peer for asked in self._asked.values())

    def answered(self, peer: Attachment, message: wire.PeerFound) -> None:
        """A peer has answered.

        :raises ProtocolError: its lists do not fit the question.
        """
        if self._late.get(message.id) is peer:
            del self._late[message.id]
            if message.lease:
                peer.send(wire.PeerRelease(message.lease))
            return
        asked = self._asked.get(message.id)
        if asked is None or asked.peer is not peer:
            return
        question = asked.question
        if len(message.states) != len(asked.keys):
            raise ProtocolError(f"{len(message.states)} states for {len(asked.keys)} keys")
        if message.lease:
            # The time of a question that waits for its hand-off says nothing of when its lease began; its owner answers
            # when it has, and the way here is what may be lost of it.
            lease_s = min(message.lease_ms, asked.lease_ms) / 1e3
            lease = self._offers.add(peer, asked.keys, message, min(asked.at, time.monotonic()), lease_s)
            lease.handoff = question.handoff
            question.found |= lease.offers.keys()
            question.open = question.open or any(offer.open for offer in lease.offers.values())
        question.reason = question.reason or message.reason
        question.failed = question.failed or message.failed
        self._settle(message.id)

    def refused(self, number: int, why: str) -> None:
        """A peer does not answer."""
        self._late.pop(number, None)
        asked = self._asked.get(number)
        if asked is not None:
            log.warning("peer_refused", peer=asked.peer.target.name, reason=why)
            asked.question.reason, asked.question.failed = asked.question.reason or why, True
            self._settle(number)

    def lost(self, peer: Attachment, why: str) -> None:
        """Nothing that this peer was asked is answered."""
        self._late = {number: other for number, other in self._late.items() if other is not peer}
        for number, asked in list(self._asked.items()):
            if asked.peer is peer:
                asked.question.reason, asked.question.failed = asked.question.reason or why, True
                self._settle(number)

    def _too_late(self, question: _Question) -> None:
        self.unanswered += 1
        question.reason = question.reason or "no answer in time"
        self._end(question)

    def _settle(self, number: int) -> None:
        question = self._asked.pop(number).question
        question.waiting.discard(number)
        if not question.waiting:
            self._end(question)

    def _end(self, question: _Question) -> None:
        self._forget(question)
        question.then(PeerAnswer(frozenset(question.found), question.open, question.reason, question.failed))

    def _drop(self, question: _Question) -> None:
        """Nobody waits for its answer any more; what was lent by then runs out, or is somebody else's by now."""
        if question.timer is not None:
            self._forget(question)

    def _forget(self, question: _Question) -> None:
        """It is over: of a peer that has not answered, only that it may still lend something is remembered."""
        assert question.timer is not None
        question.timer.cancel()
        question.timer = None
        for number in question.waiting:
            self._late[number] = self._asked.pop(number).peer
        while len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]

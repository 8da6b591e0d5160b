"""What peers were asked and have lent: each question answered once, by its deadline, with all that they lend."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from layerflow.errors import ProtocolError, shortened
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.wire import messages as wire
from layerflow.wire.packing import unpack_u32, unpack_u64
from layerflow.wire.peer_link import LINK_KEY_BYTES

# What peers have lent to this server: leases, and the objects that they offer. Bookkeeping only.


MARGIN = 0.9
"""Of a lease's time that its reader counts on: the clocks of two machines do not run alike."""


@dataclass(slots=True, eq=False)
class RemoteLease:
    """One lease of a peer. The reader counts it from when it asked, its owner from when it answered.

    :param until: monotonic seconds.
    :param fetches: numbers of the fetches that read it.
    :param handoff: whose objects they are; empty = nothing in particular. :param over: it is not needed any more.
    :param brought: keys that fetches have been begun for.
    :param layers: of open objects, by position, how many leading layers are stored.
    """

    peer: PeerAttachment
    number: int
    token: bytes
    lease_key: bytes
    lease_s: float
    until: float
    handoff: str = ""
    over: bool = False
    fetches: set[int] = field(default_factory=set)
    offers: dict[bytes, Offer] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)
    brought: set[bytes] = field(default_factory=set)

    def reading(self) -> Iterator[int]:
        """The fetches that read it, one after the other: one that has ended by then, as others failed, is left out."""
        return (number for number in list(self.fetches) if number in self.fetches)

    def stored_layers(self, keys: Iterable[bytes]) -> int:
        """How many leading layers of all these are stored; -1 = all of them, from the beginning."""
        return min((self.layers[at] for key in keys if (at := self.offers[key].position) in self.layers), default=-1)

    def progressed(self, positions: Sequence[int], layers: int) -> None:
        """More of these open objects is stored."""
        for position in positions:
            if position in self.layers:
                self.layers[position] = max(self.layers[position], layers)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """One object of a lease. :param save: of an open one: those of one number are stored together."""

    lease: RemoteLease
    position: int
    nbytes: int
    blocks: int
    open: bool = False
    save: int = 0


class Offers:
    """All leases, and the newest offer of every key."""

    def __init__(self) -> None:
        self._leases: dict[tuple[PeerAttachment, int], RemoteLease] = {}
        self._by_key: dict[bytes, Offer] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def objects(self) -> int:
        """Offered now."""
        return len(self._by_key)

    def leases(self, peer: PeerAttachment | None = None) -> Iterator[RemoteLease]:
        """Return the leases of one peer, or of all."""
        return (lease for lease in list(self._leases.values()) if peer is None or lease.peer is peer)

    def add(
        self, peer: PeerAttachment, keys: Sequence[bytes], found: wire.PeerFound, asked_at: float, lease_s: float
    ) -> RemoteLease:
        """A peer has answered. Keys that somebody else offers already are offered by both; the first one counts.

        :param found: with a state for each of `keys`.
        :param lease_s: how long it lasts from `asked_at` on, in seconds.

        :raises ProtocolError: its lists do not fit the question, it has no key, or its number is another lease's.
        """
        if (peer, found.lease) in self._leases:
            raise ProtocolError(f"lease {found.lease} is told twice")
        if len(found.lease_key) != LINK_KEY_BYTES:
            raise ProtocolError(f"lease {found.lease} has a key of {len(found.lease_key)} bytes, not {LINK_KEY_BYTES}")
        if len(found.token) != wire.PEER_TOKEN_BYTES:
            raise ProtocolError(
                f"lease {found.lease} has a token of {len(found.token)} bytes, not {wire.PEER_TOKEN_BYTES}"
            )
        if max(found.states, default=wire.MISSING) > wire.OPEN:
            raise ProtocolError(
                f"lease {found.lease} has an object in state {max(found.states)}; {wire.OPEN} is the last"
            )
        count, now = len(keys), time.monotonic()
        # What is missing costs nothing: of a long prompt it may be nearly all.
        mine = np.flatnonzero(np.frombuffer(found.states, np.uint8))
        nbytes = unpack_u64(found.nbytes, count, "nbytes")[mine].tolist()
        blocks, layers, saves = (
            unpack_u32(getattr(found, name), count, name)[mine].tolist() for name in ("blocks", "layers", "saves")
        )
        lease = RemoteLease(peer, found.lease, found.token, found.lease_key, lease_s, asked_at + MARGIN * lease_s)
        for row, at in enumerate(mine.tolist()):
            offer = Offer(lease, at, nbytes[row], blocks[row], found.states[at] == wire.OPEN, saves[row])
            lease.offers[keys[at]] = offer
            if offer.open:
                lease.layers[at] = layers[row]
            first = self._by_key.setdefault(keys[at], offer)
            if first is not offer and first.lease.until <= now:
                self._by_key[keys[at]] = offer
        self._leases[peer, lease.number] = lease
        return lease

    def get(self, key: bytes, now: float) -> Offer | None:
        """Return who offers an object, under a lease that lasts."""
        offer = self._by_key.get(key)
        return offer if offer is not None and offer.lease.until > now else None

    def lease(self, peer: PeerAttachment, number: int) -> RemoteLease | None:
        """By its owner and number."""
        return self._leases.get((peer, number))

    def forget(self, lease: RemoteLease) -> None:
        """Forget a lease."""
        self._leases.pop((lease.peer, lease.number), None)
        for key in lease.offers:
            offer = self._by_key.get(key)
            if offer is not None and offer.lease is lease:
                del self._by_key[key]

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Withdraw offers of objects that are not wanted from peers."""
        for key in keys:
            self._by_key.pop(key, None)

    def expired(self, now: float) -> list[RemoteLease]:
        """Leases whose time is over."""
        return [lease for lease in self._leases.values() if lease.until <= now]


MOST_LATE = 16_384
"""Answers that may come too late, whose leases are given back then; the leases of older ones run out."""

log = structlog.get_logger("layerflow.server.peers")


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What peers lend of what they were asked for.

    :param open: some of it is still being stored. :param reason: why a hand-off is not followed; empty = it is.
    :param failed: the hand-off will never be whole. :param leases: that the answer has brought.
    """

    found: frozenset[bytes]
    open: bool = False
    reason: str = ""
    failed: bool = False
    leases: tuple[RemoteLease, ...] = ()

    def joined(self, later: PeerAnswer) -> PeerAnswer:
        """With what they said when they were asked for more."""
        return PeerAnswer(
            self.found | later.found,
            self.open or later.open,
            self.reason or later.reason,
            self.failed or later.failed,
            self.leases + later.leases,
        )


@dataclass(slots=True)
class _Question:
    """:param waiting: numbers that have no answer. :param timer: None = it is over."""

    on_done: Callable[[PeerAnswer], None]
    handoff: str
    timer: asyncio.TimerHandle | None = None
    waiting: set[int] = field(default_factory=set)
    found: set[bytes] = field(default_factory=set)
    open: bool = False
    reason: str = ""
    failed: bool = False
    leases: list[RemoteLease] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Asked:
    question: _Question
    peer: PeerAttachment
    keys: Sequence[bytes]
    at: float
    lease_ms: int


class PeerQuestions:
    """The questions under way.

    :param offers: takes what is lent. :param numbers: of everything that peers are asked.
    """

    def __init__(self, offers: Offers, numbers: Iterator[int]) -> None:
        self._offers, self._numbers = offers, numbers
        self._asked: dict[int, _Asked] = {}
        self._late: dict[int, PeerAttachment] = {}  # what is over and was not answered, oldest first
        self.lookups = self.keys = self.unanswered = 0

    def ask(
        self,
        peers: Sequence[PeerAttachment],
        keys: Sequence[bytes],
        on_done: Callable[[PeerAnswer], None],
        *,
        timeout_s: float,
        lease_ms: int,
        handoff: str = "",
    ) -> Callable[[], None]:
        """Ask these; `on_done` is told once, perhaps at once. Call what is returned where nobody waits any more.

        :param handoff: also for what is still to be stored of it.
        """
        question, now, packed = _Question(on_done, handoff), time.monotonic(), b"".join(keys)
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
            on_done(PeerAnswer(frozenset()))
        return functools.partial(self._drop, question)

    def waits_for(self, peer: PeerAttachment) -> bool:
        """Is a question to this peer under way?"""
        return any(asked.peer is peer for asked in self._asked.values())

    def answered(self, peer: PeerAttachment, message: wire.PeerFound) -> None:
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
            # A lookup that waited for a hand-off may be minutes old: its lease is counted from the answer, not from the
            # question, less what the way here takes.
            lease_s = min(message.lease_ms, asked.lease_ms) / 1e3
            lease = self._offers.add(peer, asked.keys, message, min(asked.at, time.monotonic()), lease_s)
            lease.handoff = question.handoff
            question.leases.append(lease)
            question.found |= lease.offers.keys()
            question.open = question.open or any(offer.open for offer in lease.offers.values())
        question.reason = question.reason or shortened(message.reason)
        question.failed = question.failed or message.failed
        self._peer_done(message.id)

    def refused(self, peer: PeerAttachment, number: int, why: str) -> None:
        """A peer does not answer; of questions to others it says nothing."""
        if self._late.get(number) is peer:
            del self._late[number]
        asked = self._asked.get(number)
        if asked is not None and asked.peer is peer:
            log.warning("peer_refused", peer=peer.target.name, reason=why)
            asked.question.reason, asked.question.failed = asked.question.reason or why, True
            self._peer_done(number)

    def lost(self, peer: PeerAttachment, why: str) -> None:
        """Nothing that this peer was asked is answered."""
        self._late = {number: other for number, other in self._late.items() if other is not peer}
        for number, asked in list(self._asked.items()):
            if asked.peer is peer:
                asked.question.reason, asked.question.failed = asked.question.reason or why, True
                self._peer_done(number)

    def _too_late(self, question: _Question) -> None:
        self.unanswered += 1
        question.reason = question.reason or "no answer in time"
        self._end(question)

    def _peer_done(self, number: int) -> None:
        question = self._asked.pop(number).question
        question.waiting.discard(number)
        if not question.waiting:
            self._end(question)

    def _end(self, question: _Question) -> None:
        self._forget(question)
        found, leases = frozenset(question.found), tuple(question.leases)
        question.on_done(PeerAnswer(found, question.open, question.reason, question.failed, leases))

    def _drop(self, question: _Question) -> None:
        """Drop a question that nobody waits for; what was lent by then runs out, or is somebody else's by now."""
        if question.timer is not None:
            self._forget(question)

    def _forget(self, question: _Question) -> None:
        """Forget a question; of a peer that has not answered, that it may still lend something is remembered."""
        assert question.timer is not None
        question.timer.cancel()
        question.timer = None
        for number in question.waiting:
            self._late[number] = self._asked.pop(number).peer
        while len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]

"""What peers have lent to this server: leases, and the objects that they offer. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from layerflow.errors import ProtocolError
from layerflow.server.peers.reading.attachment import Attachment
from layerflow.wire import messages as wire
from layerflow.wire.packing import unpack_u32, unpack_u64
from layerflow.wire.peer_link import LINK_KEY_BYTES

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

    peer: Attachment
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
        self._leases: dict[tuple[Attachment, int], RemoteLease] = {}
        self._by_key: dict[bytes, Offer] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def objects(self) -> int:
        """Offered now."""
        return len(self._by_key)

    def leases(self, peer: Attachment | None = None) -> Iterator[RemoteLease]:
        """Of one peer, or all."""
        return (lease for lease in list(self._leases.values()) if peer is None or lease.peer is peer)

    def add(
        self, peer: Attachment, keys: Sequence[bytes], found: wire.PeerFound, asked_at: float, lease_s: float
    ) -> RemoteLease:
        """A peer has answered. Keys that somebody else offers already are offered by both; the first one counts.

        :param lease_s: how long it lasts from `asked_at` on, in seconds.

        :raises ProtocolError: its lists do not fit the question, or it has no key.
        """
        if len(found.lease_key) != LINK_KEY_BYTES:
            raise ProtocolError(f"lease {found.lease} has a key of {len(found.lease_key)} bytes, not {LINK_KEY_BYTES}")
        count = len(keys)
        nbytes = unpack_u64(found.nbytes, count, "nbytes").tolist()
        blocks, layers, saves = (
            unpack_u32(getattr(found, name), count, name).tolist() for name in ("blocks", "layers", "saves")
        )
        states = unpack_u32(b"".join(bytes((state, 0, 0, 0)) for state in found.states), count, "states").tolist()
        lease = RemoteLease(peer, found.lease, found.token, found.lease_key, lease_s, asked_at + MARGIN * lease_s)
        for at, state in enumerate(states):
            if state == wire.MISSING:
                continue
            offer = Offer(lease, at, nbytes[at], blocks[at], state == wire.OPEN, saves[at])
            lease.offers[keys[at]] = offer
            if offer.open:
                lease.layers[at] = layers[at]
            self._by_key.setdefault(keys[at], offer)
        self._leases[peer, lease.number] = lease
        return lease

    def get(self, key: bytes, now: float) -> Offer | None:
        """Who offers it, under a lease that lasts."""
        offer = self._by_key.get(key)
        return offer if offer is not None and offer.lease.until > now else None

    def lease(self, peer: Attachment, number: int) -> RemoteLease | None:
        """By its owner and number."""
        return self._leases.get((peer, number))

    def forget(self, lease: RemoteLease) -> None:
        """It counts no more."""
        self._leases.pop((lease.peer, lease.number), None)
        for key, offer in lease.offers.items():
            if self._by_key.get(key) is offer:
                del self._by_key[key]

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """These are not wanted from peers."""
        for key in keys:
            self._by_key.pop(key, None)

    def expired(self, now: float) -> list[RemoteLease]:
        """Leases whose time is over."""
        return [lease for lease in self._leases.values() if lease.until <= now]

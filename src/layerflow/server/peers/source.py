"""Peers as a source of objects, like the tier: asked by lookups, fetched from ahead of the steps that load.

What moves when is the core's, on the hop of peers; the importer moves it. Here is which peer lends what, until when.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError
from layerflow.flow.commands import Arrived, Call, ObjectsLost, TransferDone, Vacate
from layerflow.flow.cost.estimators import LinkModel
from layerflow.flow.events import Event, FetchFailed, Hop, HostLost
from layerflow.hosts.backend import ObjectStatus
from layerflow.keys import describe_key
from layerflow.pool.base import NewObject, Pool
from layerflow.server.peers.attachment import Attachment, PeerTarget
from layerflow.server.peers.offers import Offer, Offers, RemoteLease
from layerflow.server.tier.fetches import AtPeer, Fetches, PendingFetch
from layerflow.server.tier.index import NegativeCache
from layerflow.server.tier.process import HostProcess
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Fetched, ToServer
from layerflow.wire.messages import MAX_PEER_KEYS
from layerflow.wire.peer_link import LINK_REST_S, Origin, encode_origin

IMPORTER = "layerflow.hosts.peer.importer:Importer"
HIDE_S = 30.0
"""How long an object whose read failed is not asked for."""
RENEW_S = 0.5
"""A lease that is read and has no more of its time than this share is prolonged."""

log = structlog.get_logger("layerflow.server.peers")


@dataclass(slots=True)
class _Question:
    """A lookup that peers were asked about. :param waiting: (peer, number) of those that have not answered."""

    then: Callable[[frozenset[bytes]], None]
    keys: frozenset[bytes]
    timer: asyncio.TimerHandle | None = None
    waiting: set[tuple[Attachment, int]] = field(default_factory=set)
    found: set[bytes] = field(default_factory=set)


class PeerSource:
    """All servers that this one reads from, and their importer.

    :param arena: descriptor and size.
    :param emit: gives events to the core.
    :param numbers: of fetches, shared with the tier's.
    :param models: the specs that workers here are attached with.
    :param attach: makes the connection to a peer.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        pool: Pool,
        arena: tuple[int, int],
        emit: Callable[[Sequence[Event]], None],
        numbers: Iterator[int],
        attach: Callable[[PeerTarget, PeerSource], Attachment],
        models: Callable[[], Sequence[ModelSpec]],
    ) -> None:
        self._models = models
        self._settings, self._pool, self._emit, self._attach = settings, pool, emit, attach
        self.host = HostProcess(IMPORTER, {"timeout_ms": settings().pool.host_timeout_ms}, *arena, self)
        self.host_up = False
        self.peers: dict[str, Attachment] = {}
        self._fetches = Fetches(
            pool, self.host.send, emit, self._read_failed, numbers, hop=Hop.PEER, ended=self._fetch_ended
        )
        self._offers = Offers()
        self._reading: dict[int, RemoteLease] = {}
        self._failed_reads = NegativeCache()
        self._resting: dict[Attachment, float] = {}
        self.differences: dict[tuple[str, str], str] = {}  #: by peer and model: why nothing of its can be read
        self._compared: dict[tuple[Attachment, int], ModelSpec] = {}
        self._asked: dict[tuple[Attachment, int], tuple[_Question, Sequence[bytes], float]] = {}
        self._numbers = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._outcomes: Counter[str] = Counter()
        self.links: dict[str, LinkModel] = {}
        self._calls: deque[tuple[int, int, str, float]] = deque()
        self.lookups = self.lookup_keys = self.unanswered = 0

    def start(self) -> None:
        """Start the importer and attach to the servers that the settings name."""
        self.host.start()

    async def close(self) -> bool:
        """Give all leases back and stop the importer. True: nothing of it can touch the arena any more."""
        for lease in self._offers.leases():
            self._release(lease)
        for peer in self.peers.values():
            peer.close()
        if self._expiry is not None:
            self._expiry.cancel()
        return await self.host.close()

    def add(self, target: PeerTarget) -> Attachment:
        """Attach to a server, unless that is done."""
        known = self.peers.get(target.name)
        if known is None:
            known = self.peers[target.name] = self._attach(target, self)
            known.renew = lambda peer=known: self._to_renew(peer)  # type: ignore[misc]
            known.start()
        return known

    # Lookups -------------------------------------------------------------------------------------

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are on their way, or lent to this server already."""
        now = time.monotonic()
        return [key in self._fetches or self._offers.get(key, now) is not None for key in keys]

    def ask(self, keys: Sequence[bytes], then: Callable[[frozenset[bytes]], None], until: float) -> None:
        """Which of `keys` do peers lend? Answered once, perhaps at once, by `until` (monotonic seconds)."""
        now = time.monotonic()
        wanted = self._failed_reads.visible(keys, now)[:MAX_PEER_KEYS]
        able = [
            peer for peer in self.peers.values() if peer.endpoint() is not None and self._resting.get(peer, 0.0) <= now
        ]
        timeout_s = min(self._settings().peers.lookup_timeout_ms / 1e3, until - now)
        if not wanted or not able or not self.host_up or timeout_s <= 0:
            then(frozenset())
            return
        question = _Question(then, frozenset(wanted))
        packed, lease_ms = b"".join(wanted), self._settings().peers.lease_ms
        for peer in able:
            assert peer.welcome is not None
            self._numbers += 1
            if peer.send(wire.PeerLookup(self._numbers, peer.welcome.incarnation, packed, lease_ms)):
                question.waiting.add((peer, self._numbers))
                self._asked[peer, self._numbers] = question, wanted, now
        self.lookups += 1
        self.lookup_keys += len(wanted)
        if not question.waiting:
            then(frozenset())
            return
        question.timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late, question)

    def _too_late(self, question: _Question) -> None:
        self.unanswered += 1
        question.timer = None
        self._answer(question)

    def _answer(self, question: _Question) -> None:
        if question.timer is not None:
            question.timer.cancel()
        # What is heard of later is not asked for any more: its leases are given back then.
        question.waiting.clear()
        question.then(frozenset(question.found))

    def forgo(self, keys: Sequence[bytes]) -> None:
        """These are had from elsewhere."""
        self._offers.withdraw(keys)

    def hide(self, keys: Sequence[bytes]) -> None:
        """Reading these has failed: they are not asked for, for a while."""
        until = time.monotonic() + HIDE_S
        for key in keys:
            self._failed_reads.add(key, until)

    # Loads ---------------------------------------------------------------------------------------

    def offered(self, key: bytes) -> Offer | None:
        """Who lends it."""
        return self._offers.get(key, time.monotonic()) if self.host_up else None

    def bring(self, objects: Sequence[NewObject], layers: Sequence[int], source: str) -> None:
        """Fetch objects of one group, as far as peers lend them; see :meth:`coming`. Parameters as of the tier's."""
        by_lease: dict[tuple[RemoteLease, int], list[NewObject]] = {}
        for new in objects:
            offer = self.offered(new.key)
            if offer is None or new.key in self._fetches:
                continue
            if offer.nbytes != new.nbytes or offer.blocks != new.blocks:
                self._read_failed(
                    new.key, ObjectStatus.BROKEN, f"{offer.nbytes} bytes at {offer.lease.peer.target.name}, "
                    f"{new.nbytes} here"
                )  # fmt: skip
                continue
            by_lease.setdefault((offer.lease, offer.save), []).append(new)
        for (lease, _), mine in by_lease.items():
            endpoint = lease.peer.endpoint()
            if endpoint is None:
                continue
            origin = Origin(lease.peer.target.name, endpoint.link, endpoint.address, endpoint.incarnation, lease.token)
            positions = {new.key: lease.offers[new.key].position for new in mine}
            number = self._fetches.begin(mine, layers, source, AtPeer(encode_origin(origin), positions))
            if number:
                lease.fetches.add(number)
                self._reading[number] = lease
                self._watch_leases()

    def coming(self, key: bytes) -> PendingFetch | None:
        """An object's room in the arena while it is on its way."""
        return self._fetches.coming(key)

    def knows(self, fetch: int) -> bool:
        """Is this fetch from a peer?"""
        return self._fetches.knows(fetch)

    @property
    def fetches(self) -> Fetches:
        """What is on its way from peers."""
        return self._fetches

    def obey(self, command: Call | Arrived | ObjectsLost | Vacate | TransferDone) -> None:
        """What the core wants done on the way from peers."""
        if isinstance(command, Call):
            lease = self._reading.get(command.transfer)
            name = lease.peer.target.name if lease is not None else ""
            self._calls.append((command.call, command.nbytes, name, time.monotonic()))
        self._fetches.obey(command)

    def _fetch_ended(self, number: int) -> None:
        lease = self._reading.pop(number, None)
        if lease is not None:
            lease.fetches.discard(number)
            if not lease.fetches:
                self._release(lease)

    def _release(self, lease: RemoteLease) -> None:
        self._offers.forget(lease)
        if lease.peer.up:
            lease.peer.send(wire.PeerRelease(lease.number))

    # Leases --------------------------------------------------------------------------------------

    def _to_renew(self, peer: Attachment) -> list[int]:
        now = time.monotonic()
        leases = (lease for lease in self._offers.leases(peer) if lease.fetches)
        return [lease.number for lease in leases if lease.until - now < RENEW_S * lease.lease_s]

    def _watch_leases(self) -> None:
        """Wake when the first lease runs out."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        first = min((lease.until for lease in self._offers.leases()), default=None)
        if first is not None:
            delay = max(0.0, first - time.monotonic())
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for lease in self._offers.expired(time.monotonic()):
            self._give_up(lease, f"the lease of peer {lease.peer.target.name} has run out")
            self._release(lease)
        self._watch_leases()

    def _give_up(self, lease: RemoteLease, why: str) -> None:
        """Nothing more of it may be read."""
        for number in list(lease.fetches):
            objects = self._fetches.objects_of(number)
            coming = [at for at, new in enumerate(objects) if self._is_coming(new.key, number)]
            self._outcomes["fetch_failed"] += len(coming)
            self._emit([FetchFailed(number, tuple((at, why) for at in coming))])

    def _is_coming(self, key: bytes, number: int) -> bool:
        coming = self._fetches.coming(key)
        return coming is not None and coming.job.number == number

    # Peers ---------------------------------------------------------------------------------------

    def peer_up(self, peer: Attachment) -> None:
        """It can be read from: are its models those of this server?"""
        for spec in self._models():
            self._compare(peer, spec)

    def compare(self, spec: ModelSpec) -> None:
        """A worker has attached."""
        for peer in self.peers.values():
            if peer.up:
                self._compare(peer, spec)

    def _compare(self, peer: Attachment, spec: ModelSpec) -> None:
        self._numbers += 1
        if peer.send(wire.PeerCompare(self._numbers, spec)):
            self._compared[peer, self._numbers] = spec

    def _differs(self, peer: Attachment, message: wire.PeerCompared) -> None:
        spec = self._compared.pop((peer, message.id), None)
        if spec is None:
            return
        name = (peer.target.name, spec.name)
        if not message.difference:
            self.differences.pop(name, None)
        elif self.differences.get(name) != message.difference:
            self.differences[name] = message.difference
            log.warning("peer_differs", peer=name[0], model=name[1], difference=message.difference)

    def peer_lost(self, peer: Attachment, why: str) -> None:
        """What it has lent counts no more; what it was asked is not answered."""
        for lease in self._offers.leases(peer):
            self._give_up(lease, f"peer {peer.target.name} is lost: {why}")
            self._offers.forget(lease)
        for key in [key for key in self._asked if key[0] is peer]:
            self._settle(*key)
        for key in [key for key in self._compared if key[0] is peer]:
            del self._compared[key]
        self._watch_leases()

    def peer_said(self, peer: Attachment, message: wire.PeerFound | wire.PeerProgress | wire.PeerCompared) -> None:
        """An answer."""
        if isinstance(message, wire.PeerCompared):
            self._differs(peer, message)
            return
        if not isinstance(message, wire.PeerFound):
            return
        asked = self._asked.get((peer, message.id))
        if asked is None:
            return
        question, keys, asked_at = asked
        if message.lease:
            lease = self._offers.add(peer, keys, message, asked_at)
            if (peer, message.id) in question.waiting:
                question.found |= lease.offers.keys()
                self._watch_leases()
            else:
                self._release(lease)  # too late
        elif len(message.states) != len(keys):
            raise ProtocolError(f"{len(message.states)} states for {len(keys)} keys")
        self._settle(peer, message.id)

    def peer_refused(self, peer: Attachment, number: int, why: str) -> None:
        """A question was not answered."""
        log.warning("peer_refused", peer=peer.target.name, reason=why)
        self._settle(peer, number)

    def peer_renewed(self, peer: Attachment, sent: float, leases: list[int]) -> None:
        """These last longer."""
        for number in leases:
            lease = self._offers.lease(peer, number)
            if lease is not None:
                lease.until = max(lease.until, sent + 0.9 * lease.lease_s)
        if leases:
            self._watch_leases()

    def _settle(self, peer: Attachment, number: int) -> None:
        """One peer has answered one question, or never will."""
        asked = self._asked.pop((peer, number), None)
        if asked is None:
            return
        question = asked[0]
        if (peer, number) in question.waiting:
            question.waiting.discard((peer, number))
            if not question.waiting:
                self._answer(question)

    # The importer --------------------------------------------------------------------------------

    def host_said(self, message: ToServer) -> None:
        """News from the importer."""
        match message:
            case Fetched():
                self._time(message)
                self._rest(message)
                self._fetches.heard(message)
            case _:
                self.host_up = self.host.state.state == "up"

    def host_stuck(self, why: str) -> None:
        """It was killed and does not die."""
        self.host_up = False

    def host_lost(self, why: str) -> None:
        """It is dead and will be started anew."""
        self.host_up = False
        self._calls.clear()
        self._outcomes["fetch_failed"] += self._fetches.coming_objects
        self._emit([HostLost(f"the importer is gone: {why}", (Hop.PEER,))])

    def _rest(self, message: Fetched) -> None:
        """The link to a peer has failed: the importer reads nothing over it for a while, and lookups hit nothing."""
        lease = self._reading.get(message.id)
        if lease is not None and any(failure.outcome == ObjectStatus.FAILED for failure in message.failed):
            self._resting[lease.peer] = time.monotonic() + LINK_REST_S

    def _time(self, message: Fetched) -> None:
        """How long a call has taken, for the cost of a peer's link: calls end in order, one after the other."""
        while self._calls:
            call, nbytes, name, began = self._calls.popleft()
            if call == message.call:
                now = time.monotonic()
                if not message.failed and name:
                    self.links.setdefault(name, LinkModel()).observe(nbytes, now - began)
                self._calls = deque((*waiting[:3], now) for waiting in self._calls)
                return

    def status(self) -> dict[str, object]:
        """JSON-ready."""
        costs = {name: model.estimate for name, model in self.links.items()}
        return {
            "leases": len(self._offers),
            "offers": self._offers.objects,
            "fetching_jobs": len(self._fetches),
            "fetched_objects": self._fetches.fetched_objects,
            "fetched_bytes": self._fetches.fetched_bytes,
            "fetches_without_room": self._fetches.refused,
            "lookups": self.lookups,
            "lookup_keys": self.lookup_keys,
            "unanswered_lookups": self.unanswered,
            "failures": dict(self._outcomes),
            "importer": dataclasses.asdict(self.host.state),
            "importer_figures": dict(self.host.statistics),
            "peers": [
                {
                    "peer": peer.target.name,
                    "address": peer.target.address,
                    "link": peer.target.link,
                    "state": peer.state.value,
                    "reason": peer.reason,
                    "attempts": peer.attempts,
                    "differs": {
                        model: why for (name, model), why in self.differences.items() if name == peer.target.name
                    },
                    "leases": sum(1 for _ in self._offers.leases(peer)),
                    "gbps": round(cost.bandwidth / 1e9, 3) if (cost := costs.get(peer.target.name)) else None,
                    "latency_ms": round(cost.latency * 1e3, 3) if cost else None,
                }
                for peer in self.peers.values()
            ],
        }

    def _read_failed(self, key: bytes, outcome: int, reason: str) -> None:
        name = ObjectStatus(outcome).name.lower()
        self._outcomes[f"fetch_{name}"] += 1
        self._failed_reads.add(key, time.monotonic() + HIDE_S)
        self._offers.withdraw([key])
        log.warning("peer_read_failed", key=describe_key(key), outcome=name, reason=reason)

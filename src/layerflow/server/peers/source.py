"""Peers as a source of objects, like the tier: asked by lookups, fetched from ahead of the steps that load.

What moves when is the core's, on the hop of peers; the importer moves it. Here is which peer lends what, until when.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from layerflow.config.peers import MAX_ATTACHED
from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError, shortened
from layerflow.expiring import ExpiringSet
from layerflow.flow.commands import Call
from layerflow.flow.cost import LinkCost, LinkModel
from layerflow.flow.events import Event, FetchAvailable, Hop, HostLost, IncomingFailed
from layerflow.hosts.backend import ObjectStatus
from layerflow.keys import describe_key
from layerflow.links import links
from layerflow.pool.base import NewObject, Pool
from layerflow.server.incoming import AtPeer, IncomingFetches, IncomingObjects
from layerflow.server.peers.attachment import PeerAttachment, PeerNews, PeerTarget
from layerflow.server.peers.handoff_parts import HandoffParts
from layerflow.server.peers.questions import MARGIN, Offer, Offers, PeerAnswer, PeerQuestions, RemoteLease
from layerflow.server.tier.host import HostProcess
from layerflow.server.tier.tier import MAX_HIDDEN_KEYS
from layerflow.spec import ModelSpec, Shard
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Fetched, ToServer
from layerflow.wire.messages import MAX_PEER_KEYS, PeerReleaseHandoff
from layerflow.wire.packing import unpack_u32
from layerflow.wire.peer_link import LINK_REST_S, Origin, encode_origin

log = structlog.get_logger("layerflow.server.peers")

IMPORTER = "layerflow.hosts.peer.importer:Importer"
HIDE_S = 30.0
"""How long an object whose read failed is not asked for."""
RENEW_S = 0.5
"""A lease that is read and has no more of its time than this share is prolonged."""


class PeerSource:
    """All servers that this one reads from, and their importer.

    :param arena: descriptor and size.
    :param emit: gives events to the core.
    :param incoming: what is on its way into the arena. What peers are asked has numbers of the same series: a refusal
        says no more.
    :param models: the specs that workers here are attached with.
    :param parts: of this server's hand-offs, that peers keep.
    :param attach: makes the connection to a peer.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        pool: Pool,
        arena: tuple[int, int],
        *,
        emit: Callable[[Sequence[Event]], None],
        incoming: IncomingObjects,
        attach: Callable[[PeerTarget, PeerSource], PeerAttachment],
        models: Callable[[], Sequence[ModelSpec]],
        parts: HandoffParts,
    ) -> None:
        self._settings, self._emit, self._attach = settings, emit, attach
        link, emulated = settings().peers.link, settings().peers.link_gbps
        options = {"timeout_ms": settings().pool.host_timeout_ms, "link": link, "link_gbps": emulated}
        self.host = HostProcess(IMPORTER, options, *arena, self, mapped=links()[link].maps_arena)
        self.host_up = False
        self.peers: dict[str, PeerAttachment] = {}
        self._incoming = incoming
        self.fetches = IncomingFetches(
            incoming, self.host.send, self._read_failed, hop=Hop.PEER, called=self._called, ended=self._fetch_ended
        )
        self.offers = Offers()
        self._reading: dict[int, RemoteLease] = {}
        self._hidden: ExpiringSet[bytes] = ExpiringSet(MAX_HIDDEN_KEYS)  # their last read failed
        self._resting: ExpiringSet[PeerAttachment] = ExpiringSet(MAX_ATTACHED)  # their link has failed
        self.questions = PeerQuestions(self.offers, incoming.numbers)
        self.releases = PeerReleases()
        self.compatibility = ModelCompatibility(models, incoming.numbers)
        self.partitions = RemotePartitions(pool)
        self._parts = parts
        self.on_change: Callable[[PeerAttachment | None], None] = lambda _: None  #: told when what can be read changes
        self.waits_for: Callable[[PeerAttachment], bool] = lambda _: False  #: does a lookup wait for this peer?
        self._expiry: asyncio.TimerHandle | None = None
        self.failures: Counter[str] = Counter()
        self.costs = LinkCosts()
        self.dear_objects = 0

    def start(self) -> None:
        """Start the importer and attach to the servers that the settings name."""
        self.host.start()

    async def close(self) -> bool:
        """Give all leases back and stop the importer. True: nothing of it can touch the arena any more."""
        for lease in self.offers.leases():
            self.release(lease)
        for peer in self.peers.values():
            peer.close()
        if self._expiry is not None:
            self._expiry.cancel()
        self.releases.close()
        return await self.host.close()

    def add(self, target: PeerTarget) -> PeerAttachment:
        """Attach to a server, unless that is done."""
        known = self.peers.get(target.name)
        if known is not None:
            known.used_at = time.monotonic()
        else:
            known = self.peers[target.name] = self._attach(target, self)
            known.renew = lambda peer=known: self._to_renew(peer)  # type: ignore[misc]
            known.start()
        return known

    def forget(self, peer: PeerAttachment) -> None:
        """Leave a server that nobody needs; what is known of it is forgotten, and its descriptors are given back."""
        log.info("peer_forgotten", peer=peer.target.name, state=peer.state.value, reason=peer.reason)
        del self.peers[peer.target.name]
        peer.close()
        self.questions.lost(peer, "it is forgotten")
        self.compatibility.forget(peer)
        self.releases.forget(peer)
        self.costs.forget(peer.target.name)
        self._resting.discard(peer)

    def needed(self, peer: PeerAttachment) -> bool:
        """Is something of a peer leased, asked for, kept there, or to be told to it?"""
        leased = next(self.offers.leases(peer), None) is not None
        asked = self.questions.waits_for(peer) or self.waits_for(peer)
        return leased or asked or self.releases.wait_for(peer) or self._parts.kept_at(peer)

    # Lookups -------------------------------------------------------------------------------------

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are on their way, or lent to this server already."""
        now = time.monotonic()
        coming = self.fetches.among(keys)
        return [come or self.offers.get(key, now) is not None for key, come in zip(keys, coming, strict=True)]

    def ask(self, keys: Sequence[bytes], on_done: Callable[[frozenset[bytes]], None], until: float) -> None:
        """Call `on_done` once, perhaps at once, by `until` (monotonic seconds), with the `keys` that peers lend."""
        now = time.monotonic()
        timeout_s = min(self._settings().peers.lookup_timeout_ms / 1e3, until - now)
        able = self.able_peers(now)
        hidden = self._hidden.among(keys, now)
        wanted = [key for key in keys if key not in hidden][:MAX_PEER_KEYS]
        if not wanted or not able or timeout_s <= 0:
            on_done(frozenset())
            return
        lease_ms = self._settings().peers.lease_ms

        def answered(answer: PeerAnswer) -> None:
            self.watch_leases()
            on_done(answer.found)

        self.questions.ask(able, wanted, answered, timeout_s=timeout_s, lease_ms=lease_ms)

    def able_peers(self, now: float) -> list[PeerAttachment]:
        """Return the peers that can be read from now."""
        return [peer for peer in self.peers.values() if self.able(peer, now)]

    def able(self, peer: PeerAttachment, now: float) -> bool:
        """Return whether a peer can be read from now."""
        return self.host_up and peer.endpoint() is not None and not self._resting.holds(peer, now)

    def rests(self, peer: PeerAttachment, now: float) -> float:
        """Return in how many seconds the link to a peer is tried again after a failure; 0 = it can be used."""
        return self._resting.seconds_left(peer, now)

    def slower_than_compute(self, keys: Iterable[bytes], compute_s: float, objects: int) -> frozenset[bytes]:
        """Return what would take longer to read than to compute, peer by peer; where nothing is known, nothing.

        :param compute_s: what computing all `objects` of the prompt takes, in seconds.
        """
        lent = {key: offer for key in keys if (offer := self.offered(key)) is not None}
        found = self.costs.slower_than_compute(
            {key: (offer.lease.peer.target.name, offer.nbytes) for key, offer in lent.items()},
            compute_s / max(1, objects),
        )
        self.dear_objects += len(found)
        return found

    def decline(self, keys: Sequence[bytes]) -> None:
        """Decline objects that are had from elsewhere."""
        self.offers.withdraw(keys)

    # Loads ---------------------------------------------------------------------------------------

    def offered(self, key: bytes) -> Offer | None:
        """Return who lends an object."""
        return self.offers.get(key, time.monotonic()) if self.host_up else None

    def bring(self, objects: Sequence[NewObject], layers: Sequence[int], engine: str) -> None:
        """Fetch objects of one group, as far as peers lend them; see :meth:`coming`. Parameters as of the tier's."""
        by_lease: dict[tuple[RemoteLease, int], list[NewObject]] = {}
        for new in objects:
            offer = self.offered(new.key)
            if offer is None or new.key in self._incoming.coming:
                continue
            if offer.nbytes != new.nbytes or offer.blocks != new.blocks:
                self._read_failed(
                    new.key, ObjectStatus.BROKEN, f"{offer.nbytes} bytes at {offer.lease.peer.target.name}, "
                    f"{new.nbytes} here"
                )  # fmt: skip
                continue
            if offer.open and (stored := offer.lease.layers[offer.position]) > len(layers):
                why = f"{stored} layers of it at {offer.lease.peer.target.name}, {len(layers)} here"
                self._read_failed(new.key, ObjectStatus.BROKEN, why)
                continue
            by_lease.setdefault((offer.lease, offer.save), []).append(new)
        for (lease, _), mine in by_lease.items():
            endpoint = lease.peer.endpoint()
            if endpoint is None:
                continue
            origin = Origin(
                lease.peer.target.name, endpoint.link, endpoint.address, endpoint.incarnation, endpoint.reader,
                endpoint.reader_key, lease.token, lease.lease_key,
            )  # fmt: skip
            available = lease.stored_layers(new.key for new in mine)
            positions = {new.key: lease.offers[new.key].position for new in mine}
            number = self.fetches.begin(mine, layers, engine, AtPeer(encode_origin(origin), positions, available))
            if number:
                lease.fetches.add(number)
                lease.brought.update(positions)
                self._reading[number] = lease
                self.watch_leases()

    def _called(self, call: Call) -> None:
        lease = self._reading.get(call.transfer)
        self.costs.begun(call.call, call.nbytes, lease.peer.target.name if lease is not None else "")

    def _fetch_ended(self, number: int) -> None:
        lease = self._reading.pop(number, None)
        if lease is not None:
            lease.fetches.discard(number)
            # What was offered and is not fetched yet may be what a step brings: a tail, say.
            if not lease.fetches and (lease.over or lease.brought.issuperset(lease.offers)):
                self.release(lease)

    def release(self, lease: RemoteLease) -> None:
        """Give a lease back."""
        self.offers.forget(lease)
        if lease.peer.up:
            lease.peer.send(wire.PeerRelease(lease.number))

    # Leases --------------------------------------------------------------------------------------

    def _to_renew(self, peer: PeerAttachment) -> list[int]:
        now = time.monotonic()
        leases = (lease for lease in self.offers.leases(peer) if lease.fetches)
        return [lease.number for lease in leases if lease.until - now < RENEW_S * lease.lease_s]

    def watch_leases(self) -> None:
        """Wake when the first lease runs out."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        first = min((lease.until for lease in self.offers.leases()), default=None)
        if first is not None:
            delay = max(0.0, first - time.monotonic())
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for lease in self.offers.expired(time.monotonic()):
            if lease.fetches:
                self._give_up(lease, f"the lease of peer {lease.peer.target.name} has run out")
            self.release(lease)
        self.watch_leases()

    def _give_up(self, lease: RemoteLease, why: str) -> None:
        """Nothing more of it may be read; nor of the other parts of its hand-off, which is of no use without it."""
        lease.over = True
        for other in self.offers.leases() if lease.handoff else ():
            if other.handoff == lease.handoff and other is not lease and not other.over:
                self._give_up(other, why)
                self.release(other)
        for number in lease.reading():
            coming = self._incoming.positions(number)
            self.failures["fetch_failed"] += len(coming)
            self._emit([IncomingFailed(number, tuple((at, why) for at in coming))])

    # Peers ---------------------------------------------------------------------------------------

    def peer_up(self, peer: PeerAttachment) -> None:
        """Compare the models of a peer that can be read from with those of this server."""
        self.releases.peer_up(peer)
        self.compatibility.peer_up(peer)

    def peer_changed(self, peer: PeerAttachment) -> None:
        """A peer's state, or where it can be read, is another."""
        self.on_change(peer)

    def compare(self, spec: ModelSpec) -> None:
        """A worker has attached."""
        self.partitions.add_partition(spec)
        for peer in self.peers.values():
            if peer.up:
                self.compatibility.compare(peer, spec)

    def peer_lost(self, peer: PeerAttachment, why: str) -> None:
        """What it has lent counts no more; what it was asked is not answered."""
        for lease in self.offers.leases(peer):
            self._give_up(lease, f"peer {peer.target.name} is lost: {why}")
            self.offers.forget(lease)
        self.questions.lost(peer, why)
        if not peer.up:  # its exporter alone is another: what it keeps is still there
            self._parts.lost(peer, why)
        self.compatibility.lost(peer)
        self.watch_leases()

    def peer_said(self, peer: PeerAttachment, message: PeerNews) -> None:
        """An answer, or news."""
        match message:
            case wire.PeerFound():
                self.questions.answered(peer, message)
            case wire.PeerCompared():
                self.compatibility.answered(peer, message)
            case wire.PeerPartitions():
                self.partitions.add_peer_partitions(message)
            case wire.PeerHandoffState():
                self._parts.part_answered(peer, message)
            case wire.PeerProgress():
                self._progress(peer, message)

    def peer_refused(self, peer: PeerAttachment, number: int, why: str) -> None:
        """A question was not answered."""
        self.questions.refused(peer, number, why)
        self._parts.refused(peer, number, why)

    def _progress(self, peer: PeerAttachment, message: wire.PeerProgress) -> None:
        """Open objects of a lease: more of them is stored, or they will not be."""
        lease = self.offers.lease(peer, message.lease)
        if lease is None:
            return
        if message.reason:
            self._give_up(lease, f"peer {peer.target.name}: {shortened(message.reason)}")
            self.offers.forget(lease)
            return
        if message.layers < 0:
            raise ProtocolError(f"{message.layers} layers of lease {message.lease} are stored")
        count = len(message.positions) // 4
        if count > len(lease.layers):
            raise ProtocolError(
                f"lease {message.lease} has news of {count} objects; {len(lease.layers)} of it were being stored"
            )
        lease.progressed(unpack_u32(message.positions, count, "positions").tolist(), message.layers)
        for number in lease.reading():
            layers = lease.stored_layers(self._incoming.jobs[number].keys)
            if layers >= 0:
                self._emit([FetchAvailable(number, layers)])

    def peer_renewed(self, peer: PeerAttachment, sent: float, leases: list[int]) -> None:
        """A peer's leases last longer."""
        for number in leases:
            lease = self.offers.lease(peer, number)
            if lease is not None:
                lease.until = max(lease.until, sent + MARGIN * lease.lease_s)
        if leases:
            self.watch_leases()

    # The importer --------------------------------------------------------------------------------

    def host_said(self, message: ToServer) -> None:
        """News from the importer."""
        match message:
            case Fetched():
                self.costs.ended(message.call, whole=not message.failed)
                self._rest(message)
                self.fetches.call_ended(message)
            case _:
                self._host_is(self.host.state.state == "up")

    def host_stuck(self, why: str) -> None:
        """The importer was killed and does not die."""
        self._host_is(False)

    def host_lost(self, why: str) -> None:
        """The importer is dead and will be started anew."""
        self._host_is(False)
        self.costs.lost()
        self.failures["fetch_failed"] += self.fetches.coming_objects
        self._emit([HostLost(f"the importer is gone: {why}", (Hop.PEER,))])

    def _host_is(self, up: bool) -> None:
        if up != self.host_up:
            self.host_up = up
            self.on_change(None)

    def _rest(self, message: Fetched) -> None:
        """The link to a peer has failed: the importer reads nothing over it for a while, and lookups hit nothing."""
        lease = self._reading.get(message.id)
        if lease is not None and any(failure.outcome == ObjectStatus.FAILED for failure in message.failed):
            self._resting.add(lease.peer, time.monotonic() + LINK_REST_S)

    def counts(self) -> dict[str, int]:
        """By the names of :class:`layerflow.observe.collectors.PeerStatistics`."""
        return {
            "attached": sum(peer.up for peer in self.peers.values()),
            "read_leases": len(self.offers),
            "lookups": self.questions.lookups,
            "lookup_keys": self.questions.keys,
            "unanswered_lookups": self.questions.unanswered,
            "fetched_objects": self.fetches.fetched_objects,
            "fetched_bytes": self.fetches.fetched_bytes,
            "dear_objects": self.dear_objects,
        }

    def _read_failed(self, key: bytes, outcome: int, reason: str) -> None:
        name = ObjectStatus(outcome).name.lower()
        self.failures[f"fetch_{name}"] += 1
        self._hidden.add(key, time.monotonic() + HIDE_S)
        self.offers.withdraw([key])
        log.warning("peer_read_failed", key=describe_key(key), outcome=name, reason=reason)


# Whether the models of peers are those of this server, and in which partitions they run there.
#
# Where models differ, nothing of theirs can ever hit. Where only tensor or pipeline sizes do, the objects of other
# sizes are asked for beside those of the reader's own.


MOST_MODELS = 256
"""Models whose sizes are remembered: those of which was told last."""


class ModelCompatibility:
    """Whether peers run the models of this server. What differs is logged once and shown in status.

    :param models: the specs that workers here are attached with. :param numbers: of everything that peers are asked.
    """

    def __init__(self, models: Callable[[], Sequence[ModelSpec]], numbers: Iterator[int]) -> None:
        self._models, self._numbers = models, numbers
        self._asked: dict[int, tuple[PeerAttachment, ModelSpec]] = {}
        self.differences: dict[str, dict[str, str]] = {}  #: by peer and model, the first fact that differs

    def peer_up(self, peer: PeerAttachment) -> None:
        """Compare all models with those of a peer."""
        for spec in self._models():
            self.compare(peer, spec)

    def compare(self, peer: PeerAttachment, spec: ModelSpec) -> None:
        """Ask a peer whether its model is this one. What it was asked of models that are not here is forgotten."""
        here = self._models()
        others = {one.fingerprint for one in here} - {spec.fingerprint}
        self._asked = {
            number: asked
            for number, asked in self._asked.items()
            if asked[0] is not peer or asked[1].fingerprint in others
        }
        for name in self.differences.get(peer.target.name, {}).keys() - {spec.name, *(one.name for one in here)}:
            del self.differences[peer.target.name][name]
        number = next(self._numbers)
        if peer.send(wire.PeerCompare(number, spec)):
            self._asked[number] = peer, spec

    def lost(self, peer: PeerAttachment) -> None:
        """Forget questions that a peer will not answer."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] is not peer}

    def forget(self, peer: PeerAttachment) -> None:
        """Forget a peer that is not attached any more."""
        self.lost(peer)
        self.differences.pop(peer.target.name, None)

    def answered(self, peer: PeerAttachment, message: wire.PeerCompared) -> None:
        """Take note of a peer's answer."""
        known, spec = self._asked.get(message.id, (None, None))
        if known is not peer or spec is None:
            return
        del self._asked[message.id]
        found = self.differences.setdefault(peer.target.name, {})
        if not message.difference:
            found.pop(spec.name, None)
        elif found.get(spec.name) != (difference := shortened(message.difference)):
            found[spec.name] = difference
            log.warning("peer_differs", peer=peer.target.name, model=spec.name, difference=difference)


class RemotePartitions:
    """In which partitions peers store: told to the pool, whose lookups count what covers an object."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._remote: dict[bytes, list[Shard]] = {}

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached here: what peers have told of it matters from now on."""
        for shard in self._remote.get(spec.fingerprint, ()):
            self._pool.add_remote_partition(spec.fingerprint, shard)

    def add_peer_partitions(self, message: wire.PeerPartitions) -> None:
        """A peer tells."""
        known = self._remote.pop(message.model, [])
        fresh = [*message.partitions, *(shard for shard in known if shard not in message.partitions)]
        self._remote[message.model] = fresh[: wire.MAX_PEER_PARTITIONS]
        if len(self._remote) > MOST_MODELS:
            del self._remote[next(iter(self._remote))]
        for shard in message.partitions:
            self._pool.add_remote_partition(message.model, shard)


# What reading from each peer costs, as measured: its importer's calls, which end in order, one after the other.


class _ReadCall(NamedTuple):
    number: int
    nbytes: int
    peer: str


class LinkCosts:
    """Latency and bandwidth by the name of the peer."""

    def __init__(self) -> None:
        self._calls: deque[_ReadCall] = deque()
        self._began = 0.0
        self._models: dict[str, LinkModel] = {}

    def begun(self, call: int, nbytes: int, peer: str) -> None:
        """The importer was given a call."""
        if not self._calls:
            self._began = time.monotonic()
        self._calls.append(_ReadCall(call, nbytes, peer))

    def ended(self, number: int, *, whole: bool) -> None:
        """Note the end of a call to a peer. :param whole: all of it has come."""
        now = time.monotonic()
        while self._calls:
            call = self._calls.popleft()
            if call.number == number:
                if whole:
                    self._models.setdefault(call.peer, LinkModel()).observe(call.nbytes, now - self._began)
                break
        self._began = now

    def lost(self) -> None:
        """The importer is dead."""
        self._calls.clear()

    def forget(self, peer: str) -> None:
        """Nothing is read from it any more."""
        self._models.pop(peer, None)

    def of(self, peer: str) -> LinkCost | None:
        """What is known; None = too little."""
        model = self._models.get(peer)
        return model.estimate if model is not None else None

    def slower_than_compute(self, offered: Mapping[bytes, tuple[str, int]], object_s: float) -> frozenset[bytes]:
        """What would take longer to read than to compute, peer by peer; of a peer of which nothing is known, nothing.

        :param offered: by key, the peer and the object's bytes. :param object_s: what computing one takes.
        """
        found: set[bytes] = set()
        for peer in {name for name, _ in offered.values()}:
            cost = self.of(peer)
            sizes = {key: nbytes for key, (name, nbytes) in offered.items() if name == peer}
            if cost is not None and cost.latency + sum(sizes.values()) / cost.bandwidth > object_s * len(sizes):
                found.update(sizes)
        return frozenset(found)


# Releases of hand-offs that servers keep to which this one is not attached now: told as soon as it is.


MAX_WAITING = 4096
"""Past so many, of all servers together, the oldest is given up; its lease ends it."""


class PeerReleases:
    """One server's releases at its peers, delivered once they are attached. On its loop."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[PeerAttachment, str], float] = {}  # until when, monotonic seconds; oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self, peer: PeerAttachment, name: str, until: float) -> None:
        """Now, or once it is attached; past `until` (monotonic seconds) no more."""
        self._waiting.pop((peer, name), None)
        if peer.up and peer.send(PeerReleaseHandoff(name)):
            return
        self._waiting[peer, name] = until
        surplus = len(self._waiting) - MAX_WAITING
        self._drop(list(itertools.islice(self._waiting, max(0, surplus))), f"{MAX_WAITING} newer ones wait")
        if self._timer is None:
            self._watch()

    def peer_up(self, peer: PeerAttachment) -> None:
        """Tell a peer that is attached what it has missed."""
        for other, name in list(self._waiting):
            if other is peer and not peer.send(PeerReleaseHandoff(name)):
                return
            if other is peer:
                del self._waiting[peer, name]

    def wait_for(self, peer: PeerAttachment) -> bool:
        """Is there something to tell this peer once it is attached?"""
        return any(other is peer for other, _ in self._waiting)

    def forget(self, peer: PeerAttachment) -> None:
        """This peer is told nothing any more."""
        self._drop([each for each in self._waiting if each[0] is peer], "it was away for too long")
        self._watch()

    def close(self) -> None:
        """Tell nobody any more."""
        self._waiting.clear()
        self._watch()

    def _watch(self) -> None:
        """Wake when the first one's time is up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            delay = max(0.0, min(self._waiting.values()) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        over = [waiting for waiting, until in self._waiting.items() if until <= now]
        self._drop(over, "its lease has ended it by now")
        self._watch()

    def _drop(self, waiting: list[tuple[PeerAttachment, str]], why: str) -> None:
        for each in waiting:
            del self._waiting[each]
        if waiting:
            peer, name = waiting[0]
            log.warning("handoffs_not_released", handoffs=len(waiting), first=name, server=peer.target.name, reason=why)

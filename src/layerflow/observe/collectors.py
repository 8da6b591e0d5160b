"""Counts of the server's parts since its start, read off their snapshots: hand-offs, peers, the tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

# Counts since something's start, read off its snapshots, as counters.


class CountsSeen:
    """What each counter was raised by so far."""

    def __init__(self) -> None:
        self._seen: dict[Counter, int] = {}

    def raise_to(self, counter: Counter, count: int) -> None:
        """`count` is what was counted since somebody's start: after another start the counter adds on."""
        before = self._seen.get(counter, 0)
        counter.inc(count - before if count >= before else count)
        self._seen[counter] = count


STATES = ("announced", "open", "complete")
EVENTS = ("opened", "refused", "claimed", "completed", "failed", "revoked", "released")


class HandoffsLike(Protocol):
    """A snapshot, as :class:`layerflow.server.handoffs.handoff.HandoffStatistics` has it; sizes in bytes."""

    @property
    def kept_bytes(self) -> int: ...


class RecorderLike(Protocol):
    """A snapshot, as :class:`layerflow.server.recorder.RecorderStatistics` has it."""

    @property
    def on(self) -> bool: ...

    @property
    def events(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class HandoffMetrics:
    """Metrics ``layerflow_handoff…`` and ``layerflow_follow…``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge("layerflow_handoffs", "Hand-offs that are not over.", ["state"], registry=registry)
        self._kept = Gauge(
            "layerflow_handoff_kept_bytes", "Bytes of the arena that hand-offs pin or keep room in.", registry=registry
        )
        self._events = Counter("layerflow_handoff_events", "What became of hand-offs.", ["event"], registry=registry)
        self._followed = Counter(
            "layerflow_followed_objects", "Objects that loads followed while they were being stored.", registry=registry
        )
        self._following = Gauge(
            "layerflow_following_objects", "Those of them that are not stored yet.", registry=registry
        )
        self._seen = CountsSeen()
        for state in STATES:
            self._state.labels(state)
        for event in EVENTS:
            self._events.labels(event)

    def update(self, handoffs: HandoffsLike, followed: int, following: int) -> None:
        """Bring them up to date.

        :param followed: objects since the start. :param following: those that are not stored yet.
        """
        for state in STATES:
            self._state.labels(state).set(getattr(handoffs, state))
        self._kept.set(handoffs.kept_bytes)
        for event in EVENTS:
            self._seen.raise_to(self._events.labels(event), getattr(handoffs, event))
        self._seen.raise_to(self._followed, followed)
        self._following.set(following)


# The figures of peers: what is read from other arenas, and lent of this one; read off snapshots.


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """A snapshot. Sizes in bytes, counts since the server's start.

    :param attached: servers that can be read from now. :param readers: servers that read here.
    :param read_leases: held at peers. :param lent_leases: held by readers. :param lent_bytes: pinned for them.
    :param restarts: of importer and exporter.
    """

    attached: int = 0
    readers: int = 0
    read_leases: int = 0
    lent_leases: int = 0
    lent_bytes: int = 0
    lookups: int = 0
    lookup_keys: int = 0
    unanswered_lookups: int = 0
    fetched_objects: int = 0
    fetched_bytes: int = 0
    dear_objects: int = 0
    lent_objects: int = 0
    refused_objects: int = 0
    expired_leases: int = 0
    restarts: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


class PeerMetrics:
    """Metrics ``layerflow_peer_…``; all zero where there are no peers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"layerflow_peer_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"layerflow_peer_{name}", help_, registry=registry)

        self._failures = counter("failures", "Objects that were not read from a peer.", "outcome")
        self._gauges = {
            "attached": gauge("attached_servers", "Servers that this one can read from now."),
            "readers": gauge("reading_servers", "Servers that read this arena."),
            "read_leases": gauge("read_leases", "Leases that this server has at peers."),
            "lent_leases": gauge("lent_leases", "Leases that readers have here."),
            "lent_bytes": gauge("lent_bytes", "Bytes that these pin."),
        }
        self._counters = {
            "lookups": counter("lookups", "Questions of lookups to peers."),
            "lookup_keys": counter("lookup_keys", "Objects that these asked for."),
            "unanswered_lookups": counter("unanswered_lookups", "Lookups that peers did not answer in time."),
            "fetched_objects": counter("fetched_objects", "Objects read from peers into the arena."),
            "fetched_bytes": counter("fetched_bytes", "Bytes of them."),
            "dear_objects": counter("dear_objects", "Objects not read because computing them is quicker."),
            "lent_objects": counter("lent_objects", "Objects lent to readers."),
            "refused_objects": counter("refused_objects", "Objects not lent because too much was."),
            "expired_leases": counter("expired_leases", "Leases that readers let run out."),
            "restarts": counter("restarts", "Times that the importer or the exporter was started anew."),
        }
        self._seen = CountsSeen()

    def read(self, statistics: PeerStatistics) -> None:
        """A fresh snapshot; its counts only ever rise."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(statistics, name))
        for name, counter in self._counters.items():
            self._seen.raise_to(counter, getattr(statistics, name))
        for outcome, count in statistics.failures.items():
            self._seen.raise_to(self._failures.labels(outcome), count)


# What engines have said of their chunks.


@dataclass(frozen=True, slots=True)
class DescribedStatistics:
    """A snapshot.

    :param there: described chunks that can be hit. :param absent: others: on their way, or gone.
    :param nbytes: what the descriptions take. :param forgotten: dropped for room while their chunk was there.
    """

    there: int
    absent: int
    nbytes: int
    forgotten: int


class DescribedMetrics:
    """Metrics ``layerflow_described_…``; all zero where no engine has KV cache events on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._chunks = Gauge(
            "layerflow_described_chunks",
            "Chunks that engines have described for routers.",
            ["state"],
            registry=registry,
        )
        self._bytes = Gauge("layerflow_described_bytes", "Bytes that descriptions take.", registry=registry)
        self._forgotten = Counter(
            "layerflow_described_chunks_forgotten",
            "Chunks that routers were told are gone because server.max_described_bytes was full.",
            registry=registry,
        )
        self._seen = CountsSeen()

    def read(self, statistics: DescribedStatistics) -> None:
        """A fresh snapshot; its count only ever rises."""
        self._chunks.labels("there").set(statistics.there)
        self._chunks.labels("absent").set(statistics.absent)
        self._bytes.set(statistics.nbytes)
        self._seen.raise_to(self._forgotten, statistics.forgotten)


# The figures of the tier behind the arena: counts since the server's start, read off its snapshots.


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot. Sizes in bytes, the rest counts since the server's start.

    :param written_at: when the last object was written, on the monotonic clock; 0 = none was.
    :param failures: objects not fetched or not written, by ``fetch_<outcome>`` and ``write_<outcome>``.
    """

    up: bool
    restarts: int
    indexed_objects: int
    shunned_objects: int
    fetching_jobs: int
    writing_jobs: int
    backlog_bytes: int
    lookups: int
    lookup_keys: int
    unanswered_lookups: int
    fetched_objects: int
    fetched_bytes: int
    fetches_without_room: int
    written_objects: int
    written_bytes: int
    written_at: float
    shed_objects: int
    failures: Mapping[str, int]


class TierMetrics:
    """Metrics ``layerflow_tier_…``; all zero where nothing lies behind the arena."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"layerflow_tier_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"layerflow_tier_{name}", help_, registry=registry)

        self._up = gauge("up", "1 while the pool or disk behind the arena can be used.")
        self._backlog = gauge("backlog_bytes", "Bytes that are being written to it, or wait for that.")
        self._failures = counter("failures", "Objects that were not fetched or not written.", "outcome")
        self._counters = {
            "restarts": counter("restarts", "Times that the host process was started anew."),
            "lookups": counter("lookups", "Questions of lookups to it."),
            "lookup_keys": counter("lookup_keys", "Objects that these asked for."),
            "unanswered_lookups": counter("unanswered_lookups", "Lookups that it did not answer in time."),
            "fetched_objects": counter("fetched_objects", "Objects brought into the arena."),
            "fetched_bytes": counter("fetched_bytes", "Bytes of them."),
            "written_objects": counter("written_objects", "Objects written to it."),
            "written_bytes": counter("written_bytes", "Bytes of them."),
            "shed_objects": counter("shed_objects", "Objects not written because too much waited already."),
        }
        self._seen = CountsSeen()

    def read(self, statistics: TierStatistics) -> None:
        """A fresh snapshot; its counts only ever rise."""
        self._up.set(statistics.up)
        self._backlog.set(statistics.backlog_bytes)
        for name, counter in self._counters.items():
            self._seen.raise_to(counter, getattr(statistics, name))
        for outcome, count in statistics.failures.items():
            self._seen.raise_to(self._failures.labels(outcome), count)

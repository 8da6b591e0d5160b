"""The figures of peers: what is read from other arenas, and lent of this one; read off snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge

from layerflow.observe.metrics.counts import CountsSeen


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

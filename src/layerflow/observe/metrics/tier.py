"""The figures of the tier behind the arena: counts since the server's start, read off its snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge


class TierLike(Protocol):
    """A tier's snapshot, as :class:`layerflow.server.tier.tier.TierStatistics` has it; sizes in bytes."""

    @property
    def up(self) -> bool: ...

    @property
    def restarts(self) -> int: ...

    @property
    def lookups(self) -> int: ...

    @property
    def lookup_keys(self) -> int: ...

    @property
    def unanswered_lookups(self) -> int: ...

    @property
    def fetched_objects(self) -> int: ...

    @property
    def fetched_bytes(self) -> int: ...

    @property
    def written_objects(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def shed_objects(self) -> int: ...

    @property
    def backlog_bytes(self) -> int: ...

    @property
    def failures(self) -> Mapping[str, int]: ...


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
        self._seen: dict[str, int] = {}
        self._seen_failures: dict[str, int] = {}

    def read(self, statistics: TierLike) -> None:
        """A fresh snapshot; its counts only ever rise."""
        self._up.set(statistics.up)
        self._backlog.set(statistics.backlog_bytes)
        for name, counter in self._counters.items():
            count = getattr(statistics, name)
            counter.inc(count - self._seen.get(name, 0))
            self._seen[name] = count
        for outcome, count in statistics.failures.items():
            self._failures.labels(outcome).inc(count - self._seen_failures.get(outcome, 0))
            self._seen_failures[outcome] = count

"""The figures of the tier behind the arena: counts since the server's start, read off its snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from layerflow.observe.metrics.counts import CountsSeen


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

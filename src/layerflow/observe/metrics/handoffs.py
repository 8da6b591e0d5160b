"""The figures of hand-offs and follows: counts since the server's start, read off its snapshots."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from layerflow.observe.metrics.counts import CountsSeen

STATES = ("announced", "open", "complete")
EVENTS = ("opened", "refused", "claimed", "completed", "failed", "revoked", "released")


class HandoffsLike(Protocol):
    """A snapshot, as :class:`layerflow.server.handoffs.handoff.HandoffStatistics` has it; sizes in bytes."""

    @property
    def kept_bytes(self) -> int: ...


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

"""What the core counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the core was made. Parts are (request, group) pairs of one step and direction."""

    batches: int = 0
    batches_failed: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    failed_parts: int = 0
    committed_parts: int = 0
    revoked_parts: int = 0
    shed_parts: int = 0
    aborted_requests: int = 0
    expired_legs: int = 0
    steps_done: int = 0
    sessions_lost: int = 0
    late_reports: int = 0
    fetched_objects: int = 0
    fetched_bytes: int = 0
    expired_fetches: int = 0


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """A snapshot. Sizes in bytes; the second half counts since the core was made.

    :param failed_parts: load parts of which a block was reported as failed.
    :param revoked_parts: save parts given back, shed ones included.
    :param expired_legs: loads or saves of a step cut at their deadline.
    :param expired_fetches: fetches given up because nothing came of them.
    :param late_reports: events about steps, batches or sessions that are gone; harmless.
    """

    sessions: int
    steps: int
    load_inflight_bytes: int
    save_inflight_bytes: int
    load_inflight_batches: int
    save_inflight_batches: int
    unsaved_bytes: int
    fetches: int
    fetch_inflight_bytes: int
    batches: int
    batches_failed: int
    loaded_bytes: int
    saved_bytes: int
    failed_parts: int
    committed_parts: int
    revoked_parts: int
    shed_parts: int
    aborted_requests: int
    expired_legs: int
    steps_done: int
    sessions_lost: int
    late_reports: int
    fetched_objects: int
    fetched_bytes: int
    expired_fetches: int

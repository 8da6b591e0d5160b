"""What is counted of the tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot. Sizes in bytes, the rest counts since start.

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
    failures: dict[str, int]

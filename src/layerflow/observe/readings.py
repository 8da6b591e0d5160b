"""What the metrics read off others' records, by shape: observe imports neither the core, the protocol nor the pool."""

from __future__ import annotations

from typing import Protocol


class MeasuredLike(Protocol):
    """A finished step's bytes, and times in seconds, as :class:`layerflow.wire.messages.Figures` has them."""

    @property
    def step(self) -> int: ...

    @property
    def load_bytes(self) -> int: ...

    @property
    def save_bytes(self) -> int: ...

    @property
    def load_transfer_s(self) -> float: ...

    @property
    def load_exposed_s(self) -> float: ...

    @property
    def save_transfer_s(self) -> float: ...

    @property
    def save_exposed_s(self) -> float: ...


class FlowLike(Protocol):
    """The core's snapshot, as :class:`layerflow.flow.state.FlowStatistics` has it; sizes in bytes."""

    @property
    def steps(self) -> int: ...

    @property
    def load_inflight_bytes(self) -> int: ...

    @property
    def save_inflight_bytes(self) -> int: ...

    @property
    def load_inflight_batches(self) -> int: ...

    @property
    def save_inflight_batches(self) -> int: ...

    @property
    def unsaved_bytes(self) -> int: ...

    @property
    def expired_jobs(self) -> int: ...

    @property
    def late_reports(self) -> int: ...

    @property
    def aborted_requests(self) -> int: ...


class LimitsLike(Protocol):
    """The caps, as :class:`layerflow.flow.events.Limits` has them."""

    @property
    def prefetch_layers(self) -> int: ...

    @property
    def max_transfer_blocks(self) -> int: ...

    @property
    def max_transfer_bytes(self) -> int: ...

    @property
    def max_inflight_bytes(self) -> int: ...

    @property
    def save_backlog_bytes(self) -> int: ...

    @property
    def stagger_us(self) -> int: ...


class PoolLike(Protocol):
    """A pool's snapshot, as :class:`layerflow.pool.base.PoolStatistics` has it; sizes in bytes."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def warm_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def objects(self) -> int: ...

    @property
    def half_written(self) -> int: ...

    @property
    def pinned(self) -> int: ...

    @property
    def commits(self) -> int: ...

    @property
    def revoked(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def evicted_bytes(self) -> int: ...

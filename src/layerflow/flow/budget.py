"""The caps: what one batch may carry and what may be in flight.

Saves take at most half of the budget and a load batch is never larger than the other half, so a load
always finds room beside granted saves that wait for compute. Where the budget has just been lowered,
one load is let through when no load is in flight: saves may be waiting for the very layer it carries.
"""

from __future__ import annotations

from layerflow.errors import ConfigError
from layerflow.flow.events import Direction, Limits


class Budget:
    """Bytes granted and not yet reported, against the limits.

    `ceiling` is what may be in flight at most, with what was granted under earlier limits.

    :raises ConfigError: for limits that no transfer could meet.
    """

    __slots__ = ("batches", "ceiling", "inflight", "limits", "max_batch")

    def __init__(self, limits: Limits) -> None:
        self.inflight = [0, 0]
        self.batches = [0, 0]
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """New caps for every batch from now on. What is granted stays granted."""
        for name, least in (("max_transfer_blocks", 1), ("max_transfer_bytes", 1), ("max_inflight_bytes", 2)):
            if getattr(limits, name) < least:
                raise ConfigError(f"{name} {getattr(limits, name)} must be at least {least}, or nothing can ever move")
        for name in ("prefetch_layers", "save_backlog_bytes", "stagger_us"):
            if getattr(limits, name) < 0:
                raise ConfigError(f"{name} {getattr(limits, name)} must be 0 (off) or positive")
        self.ceiling = limits.max_inflight_bytes
        if sum(self.inflight) > self.ceiling:
            self.ceiling = sum(self.inflight) + limits.max_transfer_bytes
        self.limits = limits
        half = limits.max_inflight_bytes // 2
        self.max_batch = (
            min(limits.max_transfer_bytes, limits.max_inflight_bytes - half),
            min(limits.max_transfer_bytes, half),
        )

    def fits(self, direction: Direction, nbytes: int) -> bool:
        """Whether a batch of `nbytes` may be granted now."""
        loads, saves = self.inflight
        fits = loads + saves + nbytes <= self.limits.max_inflight_bytes
        if direction is Direction.LOAD:
            return fits or loads == 0
        return fits and saves + nbytes <= self.limits.max_inflight_bytes // 2

    def take(self, direction: Direction, nbytes: int) -> None:
        """A batch was granted."""
        self.inflight[direction] += nbytes
        self.batches[direction] += 1

    def give(self, direction: Direction, nbytes: int) -> None:
        """A batch ended."""
        self.inflight[direction] -= nbytes
        self.batches[direction] -= 1

"""The caps: what one batch may carry and what may be in flight.

Charged is what can move: loads, and saves whose layer is computed. A save that waits for compute is
charged to its session alone, so that a slow one holds up nobody else, and becomes charged when its layer
is computed, whatever room there is. Saves are granted up to half of the budget, a load batch is never
larger than the other half, and loads never wait for saves past the half: a load always finds room. What
was called back (a fence, a deadline) is charged no more; whoever does not answer holds up nobody.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from layerflow.errors import ConfigError
from layerflow.flow.events import Direction, Limits

if TYPE_CHECKING:
    from layerflow.flow.graph import Flight


class Charge(enum.IntEnum):
    """Where a batch in flight counts."""

    BUDGET = 0
    AHEAD = 1
    """A save whose layer is not computed: only against what its session may be granted ahead."""
    NONE = 2
    """Called back, or ended."""


class Budget:
    """Bytes granted and not yet reported, against the limits.

    `charged` is what counts of them, per direction. `ceiling` is what may be charged at most to loads,
    and to saves before what is granted ahead (as much again per session), with what was granted under
    earlier limits.

    :raises ConfigError: for limits that no transfer could meet.
    """

    __slots__ = ("batches", "ceiling", "charged", "half", "inflight", "limits", "max_batch")

    def __init__(self, limits: Limits) -> None:
        self.inflight = [0, 0]
        self.batches = [0, 0]
        self.charged = [0, 0]
        self.ceiling = [0, 0]
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """New caps for every batch from now on. What is granted stays granted."""
        for name, least in (("max_transfer_blocks", 1), ("max_transfer_bytes", 1), ("max_inflight_bytes", 2)):
            if getattr(limits, name) < least:
                raise ConfigError(f"{name} {getattr(limits, name)} must be at least {least}, or nothing can ever move")
        for name in ("prefetch_layers", "save_backlog_bytes", "stagger_us"):
            if getattr(limits, name) < 0:
                raise ConfigError(f"{name} {getattr(limits, name)} must be 0 (off) or positive")
        self.limits = limits
        self.half = limits.max_inflight_bytes // 2
        self.ceiling = [
            max(limits.max_inflight_bytes, self.charged[Direction.LOAD]),
            max(self.half, self.ceiling[Direction.SAVE] if self.batches[Direction.SAVE] else 0),
        ]
        self.max_batch = (
            min(limits.max_transfer_bytes, limits.max_inflight_bytes - self.half),
            min(limits.max_transfer_bytes, self.half),
        )

    def fits(self, direction: Direction, nbytes: int) -> bool:
        """Whether a batch of `nbytes` that can move at once may be granted now."""
        loads, saves = self.charged
        if direction is Direction.LOAD:
            return loads + min(saves, self.half) + nbytes <= self.limits.max_inflight_bytes
        return saves + nbytes <= self.half and loads + saves + nbytes <= self.limits.max_inflight_bytes

    def take(self, flight: Flight) -> None:
        """A batch was granted."""
        leg = flight.strand.leg
        self.inflight[leg.direction] += flight.nbytes
        self.batches[leg.direction] += 1
        if leg.direction is Direction.SAVE:
            leg.step.session.saving += flight.nbytes
            if flight.layer >= leg.step.computed:
                flight.charge = Charge.AHEAD
                leg.ahead.append(flight)
                return
        self.charged[leg.direction] += flight.nbytes

    def computed(self, flight: Flight) -> None:
        """The layer of a save granted ahead is computed: it can move now."""
        if flight.charge is Charge.AHEAD:
            flight.charge = Charge.BUDGET
            self.charged[Direction.SAVE] += flight.nbytes

    def excuse(self, flight: Flight) -> None:
        """A batch was called back: it is awaited, and charged no more."""
        if flight.charge is Charge.NONE:
            return
        leg = flight.strand.leg
        if flight.charge is Charge.BUDGET:
            self.charged[leg.direction] -= flight.nbytes
        if leg.direction is Direction.SAVE:
            leg.step.session.saving -= flight.nbytes
        flight.charge = Charge.NONE

    def give(self, flight: Flight) -> None:
        """A batch ended."""
        self.excuse(flight)
        direction = flight.strand.leg.direction
        self.inflight[direction] -= flight.nbytes
        self.batches[direction] -= 1

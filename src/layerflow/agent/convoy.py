"""Batches of one step that a lane copies in one call, seen from outside while they are under way."""

from __future__ import annotations

from collections.abc import Sequence

from layerflow.ops.copier import Headway
from layerflow.wire.messages import Batch


class Convoy:
    """Batches in the order in which they are copied. They land one by one; the lane says so of all when it is back.

    Handing the interpreter from one thread to another costs both of them time, and where there are few cores the engine
    its own: whom a thread wakes, the kernel moves next to it.
    """

    def __init__(self, direction: int, batches: Sequence[Batch]) -> None:
        self.direction = direction
        self.batches = batches
        self.headway = Headway(len(batches))
        self._positions: dict[int, list[int]] = {}
        for position, batch in enumerate(batches):
            self._positions.setdefault(batch.layer, []).append(position)

    def landed(self, layer: int) -> int:
        """How many of the layer's batches have their bytes in place."""
        landed_at = self.headway.landed_at
        return sum(landed_at[position] > 0.0 for position in self._positions.get(layer, ()))

    def halt(self) -> None:
        """No further batch begins; the running one ends."""
        self.headway.halt()

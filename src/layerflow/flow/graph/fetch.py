"""A transfer from the backend (or a peer) into the arena, and the loads that hang on it by edges."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from layerflow.flow.graph.edge import Edge
from layerflow.flow.graph.host_transfer import HostTransfer, Source
from layerflow.flow.host_events import FetchOpened


@dataclass(slots=True, eq=False)
class FetchTransfer(HostTransfer):
    """Objects on their way into the arena.

    :param numbers: the model's layer numbers.
    :param leased: a lookup wants it. :param claimed: it was leased or needed at some time.
    :param occupied: lost objects whose room is not given back.
    :param alarm: when to give it up; ``inf`` = never.
    """

    numbers: tuple[int, ...] = ()
    occupied: set[int] = field(default_factory=set)
    edges: list[Edge] = field(default_factory=list)
    leased: bool = False
    claimed: bool = False
    alarm: float = math.inf

    @property
    def wanted(self) -> bool:
        """Something waits for it, or nothing ever has."""
        return self.leased or bool(self.edges) or not self.claimed

    @property
    def size(self) -> int:
        """How many objects."""
        return len(self.objects)

    @property
    def span(self) -> int:
        """How many layers each has."""
        return self.layers

    @property
    def stalled(self) -> bool:
        """All that its source has stored has moved, and that is not all."""
        return self.index == self.limit < self.layers and not self.calls

    def urgency(self) -> tuple[float, float]:
        """How far the cursor's layer is from where a forward pass is, and the earliest deadline of such a pass."""
        layer = self.numbers[self.index]
        nearest = (float(layer + 1), math.inf)
        for edge in self.edges:
            if edge.waiting:
                step = edge.transfer.job.step
                nearest = min(nearest, (float(layer - step.frontier), step.deadline))
        return nearest

    def reached(self, objects: Sequence[int]) -> int:
        """So many leading layers of all these (ascending) have moved."""
        layers = self.index + (objects[-1] < self.at)
        for call in self.calls.values():
            first = bisect_left(objects, call.lo)
            if call.layer_lo < layers and first < len(objects) and objects[first] < call.hi:
                layers = call.layer_lo
        return layers

    def lose(self, objects: Sequence[int]) -> None:
        """These move no further; their room is taken until nothing touches it."""
        HostTransfer.lose(self, objects)  # super() finds another class where a dataclass has slots
        self.occupied.update(objects)


def fetch_of(event: FetchOpened, source: Source, available: int) -> FetchTransfer:
    """A fetch that has just begun: so many layers of it may move."""
    layers = event.layers
    return FetchTransfer(event.fetch, source, event.objects, len(layers), available, hop=event.hop, numbers=layers)

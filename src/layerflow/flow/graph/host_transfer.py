"""A transfer between arena and backend: objects of one group that a host moves layer by layer.

It has one cursor (layer, object): batches are a range of layers of all its objects, or, where one layer is
larger than a batch may be, a range of objects of that layer. Loads that need its objects hang on it by edges.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from layerflow.flow.commands import Call
from layerflow.flow.events import Hop, Item
from layerflow.flow.graph.cursor import Span

if TYPE_CHECKING:
    from layerflow.flow.graph.step import Transfer


@dataclass(slots=True, eq=False)
class Source:
    """Who transfers are for, on one hop. :param credit, queued: see :class:`layerflow.flow.state.Ring`."""

    name: str
    transfers: dict[int, HostTransfer] = field(default_factory=dict)
    credit: list[int] = field(default_factory=lambda: [0, 0])
    queued: list[bool] = field(default_factory=lambda: [False, False])

    def next_transfer(self) -> HostTransfer | None:
        """Whose layers are wanted soonest; None = nothing may move."""
        permitted = [one for one in self.transfers.values() if one.permitted]
        return (
            min(permitted, key=lambda one: (*one.urgency(), one.number))
            if len(permitted) > 1
            else (permitted[0] if permitted else None)
        )


class CallExtent(NamedTuple):
    """The next batch of a transfer, as in :class:`layerflow.flow.commands.Call`."""

    lo: int
    hi: int
    layer_lo: int
    layer_hi: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Edge:
    """Loads of one transfer that need objects of one fetch, until the step's loads are done.

    :param spans: by object, its blocks of the transfer.
    :param waiting: objects that are neither lost nor whole in the arena, ascending.
    """

    fetch: HostTransfer
    transfer: Transfer
    spans: dict[int, list[Span]]
    waiting: list[int]


@dataclass(slots=True, eq=False)
class HostTransfer:
    """One object group's movement over one hop.

    :param layers: the model's layer numbers.
    :param index: position of the cursor's layer; their number when all is granted.
    :param at: the cursor's object.
    :param dead: objects that failed or were given up. :param whole: objects of which every layer has moved.
    :param leased: a lookup wants it. :param claimed: it was leased or needed at some time.
    :param alarm: when to give it up; ``inf`` = never.
    :param closed: nothing is asked of the host any more.
    :param occupied: dead objects whose room is not given back.
    """

    hop: Hop
    number: int
    source: Source
    layers: tuple[int, ...]
    objects: tuple[Item, ...]
    index: int = 0
    at: int = 0
    dead: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    occupied: set[int] = field(default_factory=set)
    calls: dict[int, Call] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    leased: bool = False
    claimed: bool = False
    closed: bool = False
    alarm: float = math.inf
    layer_bytes: int = field(init=False)
    layer_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer_bytes = sum(item.layer_bytes for item in self.objects)
        self.layer_blocks = sum(item.blocks for item in self.objects)

    @property
    def wanted(self) -> bool:
        """Something waits for it, or nothing ever has."""
        return self.leased or bool(self.edges) or not self.claimed

    @property
    def permitted(self) -> bool:
        """A batch of it may move now."""
        return self.index < len(self.layers) and self.wanted and len(self.dead) < len(self.objects)

    def urgency(self) -> tuple[float, float]:
        """How far the cursor's layer is from where a forward pass is, and the earliest deadline of such a pass."""
        layer = self.layers[self.index]
        nearest = (float(layer + 1), math.inf)
        for edge in self.edges:
            if edge.waiting:
                step = edge.transfer.job.step
                nearest = min(nearest, (float(layer - step.frontier), step.deadline))
        return nearest

    def next_extent(self, most_blocks: int, most_bytes: int) -> CallExtent:
        """The next batch under the caps, or one layer of one object where that is larger; the cursor stays."""
        lo = self._live_from(self.at)
        if lo == self._live_from(0) and self.layer_bytes <= most_bytes and self.layer_blocks <= most_blocks:
            fit = min(most_bytes // self.layer_bytes, most_blocks // self.layer_blocks)
            layers = min(len(self.layers) - self.index, fit)
            return CallExtent(lo, len(self.objects), self.index, self.index + layers, layers * self.layer_bytes)
        nbytes = blocks = 0
        hi = lo
        while hi < len(self.objects):
            if hi not in self.dead:
                item = self.objects[hi]
                if nbytes and (nbytes + item.layer_bytes > most_bytes or blocks + item.blocks > most_blocks):
                    break
                nbytes += item.layer_bytes
                blocks += item.blocks
            hi += 1
        return CallExtent(lo, hi, self.index, self.index + 1, nbytes)

    def advance(self, extent: CallExtent) -> None:
        """Move the cursor past `extent`."""
        if extent.hi < len(self.objects):
            self.at = extent.hi
        else:
            self.index, self.at = extent.layer_hi, 0

    def reached(self, objects: Sequence[int]) -> int:
        """So many leading layers of all these (ascending) have moved."""
        layers = self.index + (objects[-1] < self.at)
        for call in self.calls.values():
            first = bisect_left(objects, call.lo)
            if call.layer_lo < layers and first < len(objects) and objects[first] < call.hi:
                layers = call.layer_lo
        return layers

    def kill(self, objects: Sequence[int]) -> None:
        """These move no further."""
        self.dead.update(objects)
        self.occupied.update(objects)
        for index in objects:
            self.layer_bytes -= self.objects[index].layer_bytes
            self.layer_blocks -= self.objects[index].blocks
        if self.at and len(self.dead) < len(self.objects) and self._live_from(self.at) == len(self.objects):
            self.index, self.at = self.index + 1, 0

    def unfinished(self) -> list[int]:
        """Objects that are neither whole nor dead."""
        return [index for index in range(len(self.objects)) if index not in self.whole and index not in self.dead]

    def _live_from(self, index: int) -> int:
        while index < len(self.objects) and index in self.dead:
            index += 1
        return index

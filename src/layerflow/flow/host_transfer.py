"""A transfer between arena and backend: objects of one group that a host moves layer by layer.

It has one cursor (layer, object): batches are a range of layers of all its objects, or, where one layer is
larger than a batch may be, a range of objects of that layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layerflow.flow.commands import Call
from layerflow.flow.events import Hop, Item


@dataclass(slots=True, eq=False)
class Client:
    """An engine that transfers of one hop are for. :param credit, queued: see :class:`layerflow.flow.ring.Ring`."""

    name: str
    transfers: dict[int, HostTransfer] = field(default_factory=dict)
    credit: list[int] = field(default_factory=lambda: [0] * len(Hop))
    queued: list[bool] = field(default_factory=lambda: [False] * len(Hop))

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
class HostTransfer:
    """One object group's movement over one hop.

    :param index: position of the cursor's layer; the number of layers when all is granted.
    :param at: the cursor's object.
    :param limit: so many layers may move.
    :param lost: objects that failed or were given up. :param whole: objects that are published.
    :param closed: nothing is asked of the host any more. :param hop: which way it goes.
    """

    number: int
    client: Client
    objects: tuple[Item, ...]
    layers: int
    limit: int
    index: int = 0
    at: int = 0
    lost: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    calls: dict[int, Call] = field(default_factory=dict)
    closed: bool = False
    hop: Hop = Hop.FETCH
    layer_bytes: int = field(init=False)
    layer_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer_bytes = sum(item.layer_bytes for item in self.objects)
        self.layer_blocks = sum(item.blocks for item in self.objects)

    @property
    def wanted(self) -> bool:
        """True while something needs the transfer; a write is always needed."""
        return True

    @property
    def permitted(self) -> bool:
        """A batch of it may move now."""
        return self.index < self.limit and self.wanted and len(self.lost) < len(self.objects)

    def urgency(self) -> tuple[float, float]:
        """How soon its next layer is wanted; the smallest goes first."""
        raise NotImplementedError

    def next_extent(self, most_blocks: int, most_bytes: int) -> CallExtent:
        """The next batch under the caps, or one layer of one object where that is larger; the cursor stays."""
        lo = self._live_from(self.at)
        if lo == self._live_from(0) and self.layer_bytes <= most_bytes and self.layer_blocks <= most_blocks:
            fit = min(most_bytes // self.layer_bytes, most_blocks // self.layer_blocks)
            layers = min(self.limit - self.index, fit)
            return CallExtent(lo, len(self.objects), self.index, self.index + layers, layers * self.layer_bytes)
        nbytes = blocks = 0
        hi = lo
        while hi < len(self.objects):
            if hi not in self.lost:
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

    def lose(self, objects: Sequence[int]) -> None:
        """Move these objects no further."""
        self.lost.update(objects)
        for index in objects:
            self.layer_bytes -= self.objects[index].layer_bytes
            self.layer_blocks -= self.objects[index].blocks
        if self.at and len(self.lost) < len(self.objects) and self._live_from(self.at) == len(self.objects):
            self.index, self.at = self.index + 1, 0

    def carried(self, call: Call) -> list[int]:
        """Objects of a call that are not lost."""
        return [index for index in range(call.lo, call.hi) if index not in self.lost]

    def unfinished(self) -> list[int]:
        """Objects that are neither whole nor lost."""
        return [index for index in range(len(self.objects)) if index not in self.whole and index not in self.lost]

    def _live_from(self, index: int) -> int:
        while index < len(self.objects) and index in self.lost:
            index += 1
        return index


def by_reason(failed: Iterable[tuple[int, str]], unfinished: Iterable[int]) -> dict[str, list[int]]:
    """Group failed objects by reason; those that were published or lost before are left out."""
    left = set(unfinished)
    reasons: dict[str, list[int]] = {}
    for index, reason in failed:
        if index in left:
            reasons.setdefault(reason, []).append(index)
    return reasons

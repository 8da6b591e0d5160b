"""Objects that another step stores, and the loads that take them as they are: no byte moves in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerflow.flow.graph.edge import Edge

if TYPE_CHECKING:
    from layerflow.flow.graph.step import Transfer


@dataclass(slots=True, eq=False)
class FollowTransfer:
    """Objects of one group that a save stores, or that have room and no save yet.

    :param number: below 0, so that no fetch has it.
    :param numbers: the model's layer numbers.
    :param size: how many objects.
    :param save: what stores them; None = nothing does (yet, or any more).
    :param parts: by object, its position among the save's step's parts.
    :param committed: the save is published.
    :param moved: objects that come from another upstream now.
    :param lent: another server reads it; :param told: so many layers it was told of.
    """

    number: int
    numbers: tuple[int, ...]
    size: int
    save: Transfer | None = None
    parts: tuple[int, ...] = ()
    committed: bool = False
    lost: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    occupied: set[int] = field(default_factory=set)
    edges: list[Edge] = field(default_factory=list)
    closed: bool = False
    lent: bool = False
    told: int = 0

    @property
    def span(self) -> int:
        """How many layers each object has."""
        return len(self.numbers)

    def reached(self, objects: Sequence[int]) -> int:
        """So many leading layers are stored.

        The last one counts once the save is published: until then all of it may turn out to be computed from a load
        that failed.
        """
        if self.committed:
            return self.span
        return min(self.save.stored(), self.span - 1) if self.save is not None else 0

    def lose(self, objects: Sequence[int]) -> None:
        """These are not stored; their room is taken until nothing touches it."""
        self.lost.update(objects)
        self.occupied.update(objects)

    def unfinished(self) -> list[int]:
        """Objects that are still to come."""
        over = self.lost | self.whole | self.moved
        return [index for index in range(self.size) if index not in over]

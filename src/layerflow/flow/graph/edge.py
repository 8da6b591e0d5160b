"""What loads depend on: objects that are not in the arena yet, and the blocks that come with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerflow.flow.graph.cursor import Span

if TYPE_CHECKING:
    from layerflow.flow.graph.step import Transfer


class Upstream(Protocol):
    """Objects that come layer by layer: a host fetches them, or another step stores them.

    :ivar lost: objects that will not come. :ivar whole: those that are published.
    :ivar occupied: lost objects whose room is not given back.
    :ivar edges: the loads that hang on them.
    :ivar closed: nothing more of it is to come.
    """

    number: int
    lost: set[int]
    whole: set[int]
    occupied: set[int]
    edges: list[Edge]
    closed: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """The model's layer numbers."""
        ...

    @property
    def size(self) -> int:
        """How many objects."""
        ...

    @property
    def span(self) -> int:
        """How many layers each has."""
        ...

    def reached(self, objects: Sequence[int]) -> int:
        """So many leading layers of all these (ascending, none of them lost) may be loaded."""
        ...

    def lose(self, objects: Sequence[int]) -> None:
        """These do not come; their room is taken until nothing touches it."""
        ...


@dataclass(slots=True, eq=False)
class Edge:
    """Loads of one transfer that need objects of one upstream, until the step's loads are done.

    :param spans: by object, its blocks of the transfer.
    :param waiting: objects that are neither lost nor whole in the arena, ascending.
    """

    upstream: Upstream
    transfer: Transfer
    spans: dict[int, list[Span]]
    waiting: list[int]

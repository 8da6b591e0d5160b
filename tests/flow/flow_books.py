"""What the model of :mod:`flow_world` notes of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerflow.flow.commands import StepDone
from layerflow.flow.events import StepOpened


def covered(ranges: list[tuple[int, int]], lo: int, hi: int) -> bool:
    """Whether the ranges cover lo..hi without a gap."""
    for start, end in sorted(ranges):
        if start <= lo < end:
            lo = end
    return lo >= hi


@dataclass
class Side:
    """One direction of a step, as the model sees it."""

    parts: list
    ranges: list[tuple[int, int]]
    submitted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    done: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    sealed: list[int] = field(default_factory=list)
    failed: list[tuple[int, int, int]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    revoked: set[int] = field(default_factory=set)
    cut: bool = False


@dataclass
class Pass:
    """A step, as the model sees it.

    :param moving: its worker moves its loads, and has not said that they ended.
    :param lost: what it has said of them that failed: (group, lo, hi).
    """

    event: StepOpened
    sides: tuple[Side, Side]
    frontier: int = -1
    computed: int = 0
    closed: bool = False
    loads_done: int = 0
    moving: bool = False
    lost: list[tuple[int, int, int]] = field(default_factory=list)
    done: StepDone | None = None


def side_of(parts) -> Side:
    ends: dict[int, int] = {}
    ranges = []
    for part in parts:
        lo = ends.get(part.group, 0)
        ends[part.group] = lo + part.blocks
        ranges.append((lo, lo + part.blocks))
    return Side(list(parts), ranges)

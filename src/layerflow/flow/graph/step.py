"""A step as a graph of transfers: its two directions, their groups, and the batches in flight."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerflow.errors import InvalidTransition
from layerflow.flow.events import LOAD, Direction, Event, Part, StepOpened
from layerflow.flow.graph.cursor import Cursor, Span, joined, touches

if TYPE_CHECKING:
    from layerflow.flow.graph.edge import Edge
    from layerflow.flow.graph.follow import FollowTransfer
    from layerflow.flow.graph.session import GroupShape, Session
    from layerflow.flow.graph.write import WriteTransfer


@dataclass(slots=True, eq=False)
class DrainBarrier:
    """What to do once the watched batches have ended.

    :param pending: batches still in flight.
    :param revoke: save parts to give back: step, positions, reason.
    :param release: an aborted request to release then.
    """

    pending: int = 0
    revoke: tuple[Step, tuple[int, ...], str] | None = None
    release: str | None = None

    def watch(self, blocks: Iterable[tuple[Transfer, Sequence[Span]]]) -> None:
        """Wait for every batch in flight that touches these blocks."""
        for transfer, spans in blocks:
            for batch in transfer.in_flight.values():
                if touches(spans, batch.lo, batch.hi):
                    self._add(batch)

    def _add(self, batch: InFlightBatch) -> None:
        if batch.watch is None:
            batch.watch = [self]
        elif self not in batch.watch:
            batch.watch.append(self)
        else:
            return
        self.pending += 1


STORY_EVENTS = 24


class Charge(enum.IntEnum):
    """Where a batch in flight counts."""

    BUDGET = 0
    GATED = 1
    """Against the budget, and against what may be granted before it can move."""
    NONE = 2
    """Called back, or ended."""


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch in flight.

    :param gate: its lane holds it until the forward pass has reached (loads) or computed (saves) this layer; -1 = it
        can move at once.
    :param watch: what waits for it to end; None in the normal case.
    """

    number: int
    transfer: Transfer
    layer: int
    lo: int
    hi: int
    nbytes: int
    gate: int = -1
    charge: Charge = Charge.BUDGET
    watch: list[DrainBarrier] | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """The blocks of one group in one direction of a step.

    :param members: positions in the job's parts, ascending.
    :param starts: first block of each member, and the number of blocks at the end.
    :param arrivals: loads: by number of each fetch, so many layers of what it still brings are in the arena.
    :param pending: cursors of this transfer, waiting ones among them.
    :param sealed: so many of the group's layers are sealed.
    :param committed: saves: every layer is stored, and said so.
    :param live: parts that are not cancelled.
    :param write: saves: what carries the objects on to the backend; None = nothing does (any more).
    :param follows: saves: what others load of it as it is stored.
    """

    job: TransferJob
    shape: GroupShape
    members: Sequence[int]
    starts: list[int]
    arrivals: dict[int, int] = field(default_factory=dict)
    pending: int = 0
    sealed: int = 0
    committed: bool = False
    live: int = field(init=False)
    write: WriteTransfer | None = None
    follows: list[FollowTransfer] = field(default_factory=list)
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = len(self.members)

    @property
    def watched(self) -> bool:
        """Saves: somebody wants to know how much is stored."""
        return self.write is not None or bool(self.follows)

    def stored(self) -> int:
        """Saves: so many layers of the group have nothing left to be granted and nothing in flight."""
        low, first = self.low(), next(iter(self.in_flight.values()), None)
        return low if first is None else min(low, bisect_left(self.shape.layers, first.layer))

    def low(self) -> int:
        """So many layers of the group have nothing left to be granted."""
        if not self.pending:
            return len(self.shape.layers)
        if len(self.job.cursors) == 1:
            return self.job.cursors[0].index
        return min(cursor.index for cursor in self.cursors())

    def cursors(self) -> list[Cursor]:
        """What of this transfer is still to be granted."""
        return [cursor for cursor in self.job.cursors if cursor.transfer is self]

    def span(self, position: int) -> Span:
        """The block numbers of the part at `position`."""
        member = bisect_left(self.members, position)
        return self.starts[member], self.starts[member + 1]

    def overlapping(self, lo: int, hi: int) -> Sequence[int]:
        """Positions of the parts that have blocks in `lo` to `hi`."""
        return self.members[bisect_right(self.starts, lo) - 1 : bisect_left(self.starts, hi)]

    def add_cursor(self, spans: list[Span], fetch: int = 0) -> None:
        """Blocks that may be granted from the first layer on, once fetch `fetch` has brought it."""
        self.job.cursors.append(Cursor(self, spans, fetch=fetch))
        self.pending += 1
        if fetch:
            self.arrivals[fetch] = 0

    def arriving(self, fetch: int) -> Cursor | None:
        """What waits for this fetch; None when all of it is there, or lost."""
        return next((c for c in self.job.cursors if c.transfer is self and c.fetch == fetch), None)

    def merge(self, cursor: Cursor) -> None:
        """Make cursors one that are about to start the same layer, all their layers being in the arena."""
        if self.pending == 1 or cursor.fetch:
            return
        for other in self.job.cursors:
            if other.transfer is self and other.index == cursor.index and other.fresh:
                if other is cursor or other.fetch:
                    continue
                cursor.absorb(other)
                self.remove(other)
                return

    def remove(self, cursor: Cursor) -> None:
        """A cursor ended."""
        self.job.cursors.remove(cursor)
        self.pending -= 1


@dataclass(slots=True, eq=False)
class TransferJob:
    """One direction of a step.

    :param parts: as given in ``StepOpened``.
    :param dropped: positions of cancelled parts, which are granted no further.
    :param failed: loads: the block ranges already reported as failed, of parts that were wholly granted then.
    :param flying: batches in flight.
    :param gated: batches granted before they could move, by gate; ended ones among them.
    :param moved: bytes that arrived.
    :param cancelled: fenced, expired or cut: nothing more is granted and no layer is sealed any more.
    :param done: loads: nothing left to do, and said so.
    :param open: saves: parts neither committed nor revoked.
    :param revoked: saves: positions given back.
    :param edges: loads: what they need of fetches, until they are done.
    :param held: saves: a commit waits for the loads of an earlier step.
    :param planned: loads: the worker moves them itself. Each group is one batch of no bytes, in flight until it says
        that they have ended.
    """

    step: Step
    direction: Direction
    parts: tuple[Part, ...]
    transfers: dict[int, Transfer] = field(default_factory=dict)
    cursors: list[Cursor] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    failed: dict[int, list[Span]] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    gated: list[InFlightBatch] = field(default_factory=list)
    flying: int = 0
    moved: int = 0
    open: int = 0
    cancelled: bool = False
    done: bool = False
    edges: list[Edge] = field(default_factory=list)
    held: bool = False
    planned: bool = False
    by_request: dict[str, list[int]] | None = None

    @property
    def reached(self) -> int:
        """The layer up to which gates are open; see :class:`InFlightBatch`."""
        return self.step.frontier if self.direction is LOAD else self.step.computed - 1

    @property
    def idle(self) -> bool:
        """Nothing to grant, nothing to wait for."""
        return not (self.flying or self.cursors)

    def head(self) -> Cursor | None:
        """The cursor that is nearest to the first layer; None when all of them wait for their objects."""
        cursors = self.cursors
        if len(cursors) == 1:
            return cursors[0] if cursors[0].index < cursors[0].limit else None
        ready = (cursor for cursor in cursors if cursor.index < cursor.limit)
        return min(ready, key=lambda cursor: (cursor.layer, cursor.at), default=None)

    def transfer_of(self, position: int) -> Transfer:
        """The transfer that the part at `position` is in."""
        return self.transfers[self.parts[position].group]

    @property
    def undecided(self) -> bool:
        """Loads: one of them may still fail. What is left of fenced loads has failed already."""
        return not (self.done or self.cancelled)

    def requests(self) -> dict[str, list[int]]:
        """The parts of each request; built at the first question."""
        if self.by_request is None:
            self.by_request = {}
            for position, part in enumerate(self.parts):
                self.by_request.setdefault(part.request, []).append(position)
        return self.by_request

    def positions_of(self, requests: Iterable[str]) -> list[int]:
        """The parts of these requests."""
        known = self.requests()
        return sorted(position for request in requests for position in known.get(request, ()))

    def spans_of(self, positions: Iterable[int]) -> list[tuple[Transfer, list[Span]]]:
        """The blocks of these parts, transfer by transfer."""
        found: dict[int, list[Span]] = {}
        for position in positions:
            group = self.parts[position].group
            found.setdefault(group, []).append(self.transfers[group].span(position))
        return [(self.transfers[group], joined(ranges)) for group, ranges in found.items()]


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass of one session.

    :param frontier: highest layer whose attention has started; -1 before the first.
    :param computed: so many layers have written their KV.
    :param closed: the forward pass ended, or every deadline passed without it.
    :param alarm: when this step next wants to be looked at; ``inf`` = never.
    """

    session: Session
    number: int
    deadline: float
    save_deadline: float
    loads: TransferJob | None = None
    saves: TransferJob | None = None
    frontier: int = -1
    computed: int = 0
    closed: bool = False
    alarm: float = math.inf
    story: deque[Event] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS))

    def next_alarm(self) -> float:
        """The earliest deadline that still has a consequence."""
        when = math.inf
        if self.loads is not None and not self.loads.done and not self.loads.cancelled:
            when = self.deadline
        if self.saves is not None and self.saves.open and not self.saves.cancelled:
            when = min(when, self.save_deadline)
        if when == math.inf and not self.closed:
            when = max(self.deadline, self.save_deadline)
        return when

    def dissolve(self) -> None:
        """Let go of what refers back to the step, which is over: its memory then needs no garbage collector."""
        for job in (self.loads, self.saves):
            if job is not None:
                for transfer in job.transfers.values():
                    transfer.in_flight.clear()
                job.transfers.clear()
                job.cursors.clear()
                job.gated.clear()
        self.loads = self.saves = None

    def impossible(self, what: str) -> InvalidTransition:
        """The error for a report that cannot be, with the step's story."""
        return InvalidTransition(f"session {self.session.number} step {self.number} {what}", self.told())

    def told(self) -> tuple[str, ...]:
        """The step's events so far, oldest first and short."""
        return tuple(_brief(event) for event in self.story)


def _brief(event: Event) -> str:
    if isinstance(event, StepOpened):
        return f"StepOpened({len(event.loads)} loads, {len(event.saves)} saves, deadline={event.deadline})"
    return repr(event)

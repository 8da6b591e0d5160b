"""The core's graph: sessions, steps, their transfers and batches, what is left of each, and what loads depend on."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from layerflow.errors import InvalidTransition, shortened
from layerflow.flow.events import (
    LOAD,
    Direction,
    Event,
    FetchOpened,
    Hop,
    LayerShape,
    LoadsLost,
    LoadsMoved,
    Part,
    SessionOpened,
    StepOpened,
)
from layerflow.flow.host_transfer import CallExtent, Client, HostTransfer
from layerflow.flow.window import BatchExtent, BlockCursor
from layerflow.lives import Life

# What the core knows of an attached engine worker.


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The layers of one group.

    :param layers: the model's layer numbers, ascending.
    :param block_bytes: bytes of one block in each of them.
    :param tail_bytes: bytes of one block from each of them to the last, and 0 at the end.
    """

    group: int
    layers: tuple[int, ...]
    block_bytes: tuple[int, ...]
    tail_bytes: tuple[int, ...]


def group_shapes(layers: Sequence[LayerShape]) -> dict[int, GroupShape]:
    """Layers by group, with the running sums that size a part without looking at its layers."""
    shapes: dict[int, GroupShape] = {}
    for group in sorted({layer.group for layer in layers}):
        numbers = tuple(number for number, layer in enumerate(layers) if layer.group == group)
        sizes = tuple(layers[number].block_bytes for number in numbers)
        tails = [0]
        for size in reversed(sizes):
            tails.append(tails[-1] + size)
        shapes[group] = GroupShape(group, numbers, sizes, tuple(reversed(tails)))
    return shapes


@dataclass(slots=True, eq=False)
class Session:
    """One attached engine worker.

    :param pending: per direction, the jobs that have something to be granted, now or once it is in the arena, in
        the order of their steps.
    :param credit: per direction, bytes it may still take in this turn.
    :param queued: per direction, whether it stands in the ring.
    :param unsaved: bytes of its saves that are neither stored nor given up.
    :param gated: per direction, bytes granted that cannot move yet, less what was called back.
    :param aborting: requests whose blocks a batch may still touch.
    """

    number: int
    num_layers: int
    groups: dict[int, GroupShape]
    steps: dict[int, FlowStep] = field(default_factory=dict)
    pending: tuple[dict[int, TransferJob], dict[int, TransferJob]] = field(default_factory=lambda: ({}, {}))
    credit: list[int] = field(default_factory=lambda: [0, 0])
    queued: list[bool] = field(default_factory=lambda: [False, False])
    unsaved: int = 0
    gated: list[int] = field(default_factory=lambda: [0, 0])
    aborting: dict[str, DrainBarrier] = field(default_factory=dict)


def open_session(event: SessionOpened) -> Session:
    """A session from its first message.

    :raises InvalidTransition: for a shape that cannot be.
    """
    if not event.layers or any(layer.block_bytes <= 0 or layer.group < 0 for layer in event.layers):
        raise InvalidTransition(
            f"session {event.session} opened with layers {event.layers[:4]}...: it needs at least one layer, "
            "and every layer a group and a positive block size"
        )
    return Session(event.session, len(event.layers), group_shapes(event.layers))


# What of a transfer is left to be moved: sorted ranges of blocks, and a cursor through the layers.


Span = tuple[int, int]


def joined(ranges: Iterable[Span]) -> list[Span]:
    """Ranges in any order, disjoint, as spans; neighbours that touch become one."""
    spans: list[Span] = []
    for lo, hi in sorted(ranges):
        if spans and spans[-1][1] >= lo:
            spans[-1] = (spans[-1][0], max(spans[-1][1], hi))
        else:
            spans.append((lo, hi))
    return spans


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of `spans` when `holes` are taken out."""
    left: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(holes) and holes[first][1] <= lo:
            first += 1
        at, hole = lo, first
        while hole < len(holes) and holes[hole][0] < hi:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = max(at, holes[hole][1])
            hole += 1
        if at < hi:
            left.append((at, hi))
    return left


def common(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is in both."""
    both: list[Span] = []
    first = 0
    for lo, hi in spans:
        while first < len(others) and others[first][1] <= lo:
            first += 1
        other = first
        while other < len(others) and others[other][0] < hi:
            both.append((max(lo, others[other][0]), min(hi, others[other][1])))
            other += 1
    return both


def missing(spans: Sequence[Span], lo: int, hi: int) -> list[Span]:
    """What of `lo` to `hi` is not in `spans`. Costs O(log(spans)) and a look at each one in between."""
    return without([(lo, hi)], spans[_near(spans, lo, hi)])


def add_span(spans: list[Span], lo: int, hi: int) -> None:
    """Add blocks to `spans`, which stay as :func:`joined` makes them. Costs as :func:`missing`."""
    near = _near(spans, lo, hi)
    if met := spans[near]:
        lo, hi = min(lo, met[0][0]), max(hi, met[-1][1])
    spans[near] = [(lo, hi)]


def _near(spans: Sequence[Span], lo: int, hi: int) -> slice:
    """Where the spans stand that overlap `lo` to `hi` or touch it."""
    first = bisect_left(spans, (lo, lo))
    if first and spans[first - 1][1] >= lo:
        first -= 1
    return slice(first, bisect_left(spans, (hi + 1, hi + 1)))


def touches(spans: Sequence[Span], lo: int, hi: int) -> bool:
    """Whether any block of `lo` to `hi` is in `spans`."""
    at = bisect_right(spans, (lo, hi))
    return (at < len(spans) and spans[at][0] < hi) or (at > 0 and spans[at - 1][1] > lo)


@dataclass(slots=True, eq=False)
class Cursor(BlockCursor):
    """Blocks of a transfer that have reached the same layer.

    :param index: position of the cursor's layer within the transfer's layers; their number when all is granted.
    :param incoming: number of the fetch or follow that has layers to bring yet; 0 = every layer is in the arena.
    :param limit: so many layers may be granted.
    :param at: next block of that layer.
    :param byte_at: bytes of block `at` that are granted already.
    """

    transfer: Transfer
    spans: list[Span]
    index: int = 0
    span_index: int = 0
    byte_at: int = 0
    incoming: int = 0
    limit: int = field(init=False)
    at: int = field(init=False)
    end: int = field(init=False)
    layer: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = 0 if self.incoming else len(self.transfer.shape.layers)
        self._enter(self.index)

    def _enter(self, index: int) -> None:
        self.index, self.span_index, self.byte_at = index, 0, 0
        self.at, self.end = self.spans[0]
        shape = self.transfer.shape
        if index < len(shape.layers):
            self.layer = shape.layers[index]
            self.block_bytes = shape.block_bytes[index]

    @property
    def exhausted(self) -> bool:
        """Every layer is granted, or no block is left."""
        return self.index >= len(self.transfer.shape.layers)

    @property
    def waiting(self) -> bool:
        """What may be granted is granted."""
        return self.index >= self.limit

    @property
    def fresh(self) -> bool:
        """Nothing of the cursor's layer is granted of the blocks that are left."""
        return not self.byte_at and self.at == self.spans[0][0]

    def permit(self, layers: int) -> None:
        """Let so many layers be granted: they are in the arena."""
        self.limit = layers
        if layers == len(self.transfer.shape.layers):
            self.incoming = 0

    def advance(self, extent: BatchExtent) -> bool:
        """Move the cursor past `extent`; whether that finished the layer."""
        if extent.byte_hi and extent.byte_hi < self.block_bytes:
            self.byte_at = extent.byte_hi
            return False
        self.byte_at = 0
        if extent.hi < self.end:
            self.at = extent.hi
            return False
        self.span_index += 1
        if self.span_index < len(self.spans):
            self.at, self.end = self.spans[self.span_index]
            return False
        self._enter(self.index + 1)
        return True

    def absorb(self, other: Cursor) -> None:
        """Take the blocks of another fresh cursor at the same layer."""
        self.spans = joined([*self.spans, *other.spans])
        self._enter(self.index)

    def drop(self, holes: list[Span]) -> int:
        """Forget blocks of cancelled parts. Returns the bytes that were still to be granted of them, all layers."""
        gone = common(self.spans, holes)
        if not gone:
            return 0
        remaining = self.transfer.shape.tail_bytes[self.index]
        freed = 0
        for lo, hi in gone:
            granted = max(0, min(hi, self.at) - lo) * self.block_bytes
            if lo <= self.at < hi:
                granted += self.byte_at
            freed += (hi - lo) * remaining - granted
        self.spans = without(self.spans, holes)
        if not self.spans:
            self.index = len(self.transfer.shape.layers)
            return freed
        for span_index, (lo, hi) in enumerate(self.spans):
            if hi > self.at:
                self.span_index, self.end = span_index, hi
                if lo > self.at:
                    self.at, self.byte_at = lo, 0
                return freed
        self._enter(self.index + 1)
        return freed


@dataclass(slots=True, eq=False)
class DrainBarrier:
    """What to do once the watched batches have ended.

    :param pending: batches still in flight.
    :param revoke: save parts to give back: step, positions, reason.
    :param release: an aborted request to release then.
    """

    pending: int = 0
    revoke: tuple[FlowStep, tuple[int, ...], str] | None = None
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
STORY_CHARS = 200
"""Characters of one event in a story, as it is told."""


class Accounting(enum.IntEnum):
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
    accounting: Accounting = Accounting.BUDGET
    watch: list[DrainBarrier] | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """The blocks of one group in one direction of a step.

    :param members: positions in the job's parts, ascending.
    :param starts: first block of each member, and the number of blocks at the end.
    :param failed: loads: the blocks that were reported as failed; planned ones: those of cancelled parts too.
    :param arrivals: loads: by number of each incoming, so many layers of what it still brings are in the arena.
    :param pending: cursors of this transfer, waiting ones among them.
    :param sealed: so many of the group's layers are sealed.
    :param committed: saves: every layer is stored, and said so.
    :param live_parts: parts that are not cancelled.
    :param write: saves: what carries the objects on to the backend; None = nothing does (any more).
    :param follows: saves: what others load of it as it is stored.
    """

    job: TransferJob
    shape: GroupShape
    members: Sequence[int]
    starts: list[int]
    failed: list[Span] = field(default_factory=list)
    arrivals: dict[int, int] = field(default_factory=dict)
    pending: int = 0
    sealed: int = 0
    committed: bool = False
    live_parts: int = field(init=False)
    write: WriteTransfer | None = None
    follows: list[IncomingSave] = field(default_factory=list)
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live_parts = len(self.members)

    @property
    def has_observers(self) -> bool:
        """Saves: somebody wants to know how much is stored."""
        return self.write is not None or bool(self.follows)

    def stored(self) -> int:
        """Saves: so many layers of the group have nothing left to be granted and nothing in flight."""
        low, first = self.first_open_layer(), next(iter(self.in_flight.values()), None)
        return low if first is None else min(low, bisect_left(self.shape.layers, first.layer))

    def first_open_layer(self) -> int:
        """Return how many leading layers of the group have nothing left to be granted."""
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

    def add_cursor(self, spans: list[Span], incoming: int = 0) -> None:
        """Add blocks that may be granted from the first layer on, once `incoming` has brought it."""
        self.job.cursors.append(Cursor(self, spans, incoming=incoming))
        self.pending += 1
        if incoming:
            self.arrivals[incoming] = 0

    def arriving(self, incoming: int) -> Cursor | None:
        """Return the cursor that waits for `incoming`; None when all of it is there, or lost."""
        return next((c for c in self.job.cursors if c.transfer is self and c.incoming == incoming), None)

    def merge(self, cursor: Cursor) -> None:
        """Make cursors one that are about to start the same layer, all their layers being in the arena."""
        if self.pending == 1 or cursor.incoming:
            return
        for other in self.job.cursors:
            if other.transfer is self and other.index == cursor.index and other.fresh:
                if other is cursor or other.incoming:
                    continue
                cursor.absorb(other)
                self.remove(other)
                return

    def remove(self, cursor: Cursor) -> None:
        """A cursor ended."""
        self.job.cursors.remove(cursor)
        self.pending -= 1


class JobState(enum.Enum):
    """Where one direction of a step is."""

    OPEN = 0
    CANCELLED = 1
    ENDED = 2


OPEN, CANCELLED, ENDED = JobState  # a member is looked up in its class several times an event otherwise

JOB_LIFE = Life(
    "one direction of a step",
    {
        OPEN: ("batches are granted, as far as caps and the forward pass allow", (CANCELLED, ENDED)),
        CANCELLED: ("fenced, expired or cut: nothing more is granted, and what is in flight is awaited", (ENDED,)),
        ENDED: (
            "loads: nothing is left to be moved. Saves: every part is committed or revoked",
            (),
        ),
    },
)


class PartState(enum.Enum):
    """Where a part of a step is: what one request loads or saves of one group."""

    OPEN = 0
    IN_PLACE = 1
    COMMITTED = 2
    CANCELLED = 3
    REVOKED = 4


PART_LIFE = Life(
    "a part of a step",
    {
        PartState.OPEN: (
            "some of its blocks wait for their turn or for their objects, or are in flight",
            (PartState.IN_PLACE, PartState.CANCELLED),
        ),
        PartState.IN_PLACE: (
            "every layer has been moved, but for blocks that were reported as failed. A save waits for what it was "
            "computed from: the loads of its step, and earlier ones of its request",
            (PartState.COMMITTED, PartState.CANCELLED),
        ),
        PartState.COMMITTED: ("a save: published, and pinned no more by its step", ()),
        PartState.CANCELLED: (
            "a load that failed, or either of a request that was aborted, or of a step that was fenced, cut or "
            "expired: nothing more is granted. A save waits for the batches that touch it",
            (PartState.REVOKED,),
        ),
        PartState.REVOKED: ("a save: its room in the arena is given back", ()),
    },
)


@dataclass(slots=True, eq=False)
class TransferJob:
    """One direction of a step.

    :param parts: as given in ``StepOpened``.
    :param dropped: positions of cancelled parts, which are granted no further.
    :param in_flight_count: batches in flight.
    :param gated: batches granted before they could move, by gate; ended ones among them.
    :param moved: bytes that arrived.
    :param state: no layer is sealed any more unless it is open.
    :param open: saves: parts neither committed nor revoked.
    :param revoked: saves: positions given back.
    :param dependencies: loads: what they need of fetches, until they are done.
    :param held: saves: a commit waits for the loads of an earlier step.
    :param planned: loads: the worker moves them itself. Each group is one batch of no bytes, in flight until it says
        that they have ended.
    :param lost_ranges: planned loads: failed ranges that were told before the end.
    :param hurt: planned loads: requests that have lost blocks.
    """

    step: FlowStep
    direction: Direction
    parts: tuple[Part, ...]
    transfers: dict[int, Transfer] = field(default_factory=dict)
    cursors: list[Cursor] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    revoked: set[int] = field(default_factory=set)
    gated: list[InFlightBatch] = field(default_factory=list)
    in_flight_count: int = 0
    moved: int = 0
    open: int = 0
    state: JobState = OPEN
    dependencies: list[Dependency] = field(default_factory=list)
    held: bool = False
    planned: bool = False
    lost_ranges: int = 0
    hurt: set[str] = field(default_factory=set)
    by_request: dict[str, list[int]] | None = None

    @property
    def gates_open_to(self) -> int:
        """The layer up to which gates are open; see :class:`InFlightBatch`."""
        return self.step.frontier if self.direction is LOAD else self.step.computed - 1

    @property
    def idle(self) -> bool:
        """Nothing to grant, nothing to wait for."""
        return not (self.in_flight_count or self.cursors)

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

    def enter(self, state: JobState) -> None:
        """:raises InvalidTransition: where its life does not allow it."""
        if self.state is not state:
            JOB_LIFE.check(self.state, state, f"{self.direction.name} of step {self.step.number}")
            self.state = state

    def close_parts(self, count: int) -> None:
        """Saves: so many parts more are committed or revoked."""
        self.open -= count
        if not self.open:
            self.enter(ENDED)

    def part_state(self, position: int) -> PartState:
        """Where the part at `position` is."""
        if position in self.dropped:
            return PartState.REVOKED if position in self.revoked else PartState.CANCELLED
        transfer = self.transfer_of(position)
        if transfer.committed:
            return PartState.COMMITTED
        lo, hi = transfer.span(position)
        moving = any(lo < batch.hi and batch.lo < hi for batch in transfer.in_flight.values())
        if moving or any(touches(cursor.spans, lo, hi) for cursor in transfer.cursors()):
            return PartState.OPEN
        return PartState.IN_PLACE

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
class FlowStep:
    """One forward pass of one session.

    :param frontier: highest layer whose attention has started; -1 before the first.
    :param computed: so many layers have written their KV.
    :param closed: the forward pass ended, or every deadline passed without it.
    :param alarm: when this step next wants to be looked at; ``inf`` = never.
    :param story: its last events; of those that list parts or blocks, words.
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
    story: deque[Event | str] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS))

    def next_alarm(self) -> float:
        """The earliest deadline that still has a consequence."""
        when = math.inf
        if self.loads is not None and self.loads.state is OPEN:
            when = self.deadline
        if self.saves is not None and self.saves.state is OPEN:
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

    def heard(self, event: Event) -> None:
        """Add an event to the story, which keeps no list of it: one may be as long as a message."""
        self.story.append(_brief(event) if isinstance(event, StepOpened | LoadsLost | LoadsMoved) else event)

    def impossible(self, what: str) -> InvalidTransition:
        """The error for a report that cannot be, with the step's story."""
        return InvalidTransition(f"session {self.session.number} step {self.number} {what}", self.recent_events())

    def recent_events(self) -> tuple[str, ...]:
        """The step's last events, oldest first, each in at most :data:`STORY_CHARS` characters."""
        return tuple(event if isinstance(event, str) else _brief(event) for event in self.story)


def _brief(event: Event) -> str:
    match event:
        case StepOpened():
            told = f"StepOpened({len(event.loads)} loads, {len(event.saves)} saves, deadline={event.deadline})"
        case LoadsLost():
            told = f"LoadsLost({len(event.failed)} failed ranges)"
        case LoadsMoved():
            told = f"LoadsMoved({event.nbytes} bytes, {len(event.failed)} failed ranges)"
        case _:
            told = repr(event)
    return shortened(told, STORY_CHARS)


# What loads depend on: objects that are not in the arena yet, and the blocks that come with each of them.


class IncomingObjectState(enum.Enum):
    """Where one object of an incoming is."""

    COMING = 0
    PUBLISHED = 1
    REBOUND = 2
    LOST = 3
    FREED = 4


OBJECT_LIFE = Life(
    "an object on its way",
    {
        IncomingObjectState.COMING: (
            "a host fetches it, a step stores it here, or it has room and no step saves it yet. Loads take its layers "
            "as they come",
            (IncomingObjectState.PUBLISHED, IncomingObjectState.REBOUND, IncomingObjectState.LOST),
        ),
        IncomingObjectState.PUBLISHED: ("whole in the arena, and read by anybody", ()),
        IncomingObjectState.REBOUND: ("a step saves what had only room, or a fetch brings it: it goes on there", ()),
        IncomingObjectState.LOST: (
            "the loads that need it have failed; its room is held while a host, a reader or a load may touch it",
            (IncomingObjectState.FREED,),
        ),
        IncomingObjectState.FREED: ("its room in the arena is given back", ()),
    },
)


class Incoming:
    """Objects of one group that come layer by layer: a host fetches them, or a step stores them here.

    Its fields are those of :class:`IncomingFetch` and :class:`IncomingSave`; this class has none of its own, so that
    a fetch can be a :class:`HostTransfer` as well.

    :ivar number: fetches and follows are numbered together, ascending.
    :ivar layer_numbers: the model's layer numbers.
    :ivar lost: objects that will not come. :ivar whole: those that are published.
    :ivar occupied: lost objects whose room is not given back.
    :ivar dependencies: of the loads that need its objects.
    :ivar leased: somebody wants it beside the loads: a lookup a fetch, another server a follow.
    :ivar closed: nothing more of it is to come.
    """

    __slots__ = ()
    kind: ClassVar[str] = "incoming"  #: what messages call it
    absent: ClassVar[str]  #: what is said of objects that do not come

    number: int
    hop: Hop
    layer_numbers: tuple[int, ...]
    lost: set[int]
    whole: set[int]
    occupied: set[int]
    dependencies: list[Dependency]
    leased: bool
    closed: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def size(self) -> int:
        """How many objects it has."""
        raise NotImplementedError

    @property
    def wanted(self) -> bool:
        """Whether it goes on. Only a fetch ends because nothing wants it."""
        return True

    @property
    def moving(self) -> bool:
        """Whether a host has been asked for some of it and has not answered."""
        return False

    @property
    def room_in_use(self) -> bool:
        """Whether anything but loads may touch the room of its lost objects."""
        return self.moving

    def layers_ready(self, objects: Sequence[int]) -> int:
        """Return how many leading layers of all these (ascending, none of them lost) may be loaded."""
        raise NotImplementedError

    def coming(self, index: int) -> bool:
        """Whether this object is still to come."""
        return index not in self.lost and index not in self.whole

    def object_state(self, index: int) -> IncomingObjectState:
        """Where this object is."""
        if index in self.lost:
            return IncomingObjectState.LOST if index in self.occupied else IncomingObjectState.FREED
        if index in self.whole:
            return IncomingObjectState.PUBLISHED
        return IncomingObjectState.COMING if self.coming(index) else IncomingObjectState.REBOUND

    def unfinished(self) -> list[int]:
        """Objects that are still to come."""
        return [index for index in range(self.size) if self.coming(index)]

    def lose(self, objects: Sequence[int]) -> None:
        """Mark objects as lost. Their arena slots stay reserved until nothing uses them, see :attr:`occupied`."""
        self.lost.update(objects)
        self.occupied.update(objects)


@dataclass(slots=True, eq=False)
class Dependency:
    """Loads of one transfer that need objects of one incoming, until the step's loads are done.

    :param spans: by object, its blocks of the transfer.
    :param waiting: objects that are neither lost nor whole in the arena, ascending.
    """

    incoming: Incoming
    transfer: Transfer
    spans: dict[int, list[Span]]
    waiting: list[int]


# Objects that another step stores, and the loads that take them as they are: no byte moves in between.


@dataclass(slots=True, eq=False)
class IncomingSave(Incoming):
    """Objects of one group that a save stores, or that have room and no save yet.

    :param count: how many objects.
    :param save: what stores them; None = nothing does (yet, or any more).
    :param parts: by object, its position among the save's step's parts.
    :param committed: the save is published.
    :param rebound: objects that come from another incoming now.
    :param reported_layers: those that its reader, another server, was told of.
    """

    kind: ClassVar[str] = "follow"
    absent: ClassVar[str] = "not stored"

    number: int
    layer_numbers: tuple[int, ...]
    count: int
    save: Transfer | None = None
    parts: tuple[int, ...] = ()
    committed: bool = False
    leased: bool = False
    lost: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    rebound: set[int] = field(default_factory=set)
    occupied: set[int] = field(default_factory=set)
    dependencies: list[Dependency] = field(default_factory=list)
    closed: bool = False
    reported_layers: int = 0
    hop: Hop = Hop.LOCAL

    @property
    def size(self) -> int:
        """How many objects it has."""
        return self.count

    @property
    def room_in_use(self) -> bool:
        """Whether another server may read the room of its lost objects."""
        return self.leased

    def layers_ready(self, objects: Sequence[int]) -> int:
        """Return how many leading layers are stored.

        The last one counts once the save is published: until then all of it may turn out to be computed from a load
        that failed.
        """
        layers = len(self.layer_numbers)
        if self.committed:
            return layers
        return min(self.save.stored(), layers - 1) if self.save is not None else 0

    def coming(self, index: int) -> bool:
        """Whether this object is still to come, and by this follow."""
        return Incoming.coming(self, index) and index not in self.rebound


# A transfer from the backend (or a peer) into the arena, and the loads that depend on it.


@dataclass(slots=True, eq=False)
class IncomingFetch(HostTransfer, Incoming):
    """Objects on their way into the arena, from the backend or from a peer.

    :param claimed: it was leased or needed at some time.
    :param alarm: when to give it up; ``inf`` = never.
    """

    kind: ClassVar[str] = "fetch"
    absent: ClassVar[str] = "not fetched"

    layer_numbers: tuple[int, ...] = ()
    occupied: set[int] = field(default_factory=set)
    dependencies: list[Dependency] = field(default_factory=list)
    leased: bool = False
    claimed: bool = False
    alarm: float = math.inf

    @property
    def size(self) -> int:
        """How many objects it has."""
        return len(self.objects)

    @property
    def moving(self) -> bool:
        """Whether its host has been asked for some of it and has not answered."""
        return bool(self.calls)

    @property
    def wanted(self) -> bool:
        """True while a load or lease needs the transfer, or before anything has needed it."""
        return self.leased or bool(self.dependencies) or not self.claimed

    @property
    def stalled(self) -> bool:
        """All that its source has stored has moved, and that is not all."""
        return self.index == self.limit < self.layers and not self.calls

    def urgency(self) -> tuple[float, float]:
        """How far the cursor's layer is from where a forward pass is, and the earliest deadline of such a pass."""
        layer = self.layer_numbers[self.index]
        nearest = (float(layer + 1), math.inf)
        for dependency in self.dependencies:
            if dependency.waiting:
                step = dependency.transfer.job.step
                nearest = min(nearest, (float(layer - step.frontier), step.deadline))
        return nearest

    def layers_ready(self, objects: Sequence[int]) -> int:
        """Return how many leading layers of all these (ascending) have moved."""
        layers = self.index + (objects[-1] < self.at)
        for call in self.calls.values():
            first = bisect_left(objects, call.lo)
            if call.layer_lo < layers and first < len(objects) and objects[first] < call.hi:
                layers = call.layer_lo
        return layers

    def lose(self, objects: Sequence[int]) -> None:
        """Mark objects as lost. Their arena slots stay reserved until no call or load uses them."""
        HostTransfer.lose(self, objects)
        Incoming.lose(self, objects)


def fetch_of(event: FetchOpened, client: Client, available: int) -> IncomingFetch:
    """A fetch that has just begun: so many layers of it may move."""
    layers = event.layers
    return IncomingFetch(
        event.fetch, client, event.objects, len(layers), available, hop=event.hop, layer_numbers=layers
    )


# A transfer from the arena to the backend: what one step saves of one group, behind the saves themselves.


@dataclass(slots=True, eq=False)
class WriteTransfer(HostTransfer):
    """Objects on their way to the backend.

    :param parts: by object, its position among the step's saves.
    :param save: what stores them in the arena; None once that is committed, or nothing of it is left.
    :param nbytes: of all objects: what it takes of the backlog.
    :param begun: the host knows of it.
    :param publishing: the host has been asked to publish what is left of it.
    """

    hop: Hop = Hop.WRITE
    parts: tuple[int, ...] = ()
    save: Transfer | None = None
    nbytes: int = 0
    begun: bool = False
    publishing: bool = False

    def urgency(self) -> tuple[float, float]:
        """First come, first served: an older write is nearer to being readable."""
        return (0.0, 0.0)

    @property
    def permitted(self) -> bool:
        """A batch of it may move now, or it may be published."""
        left = len(self.lost) < len(self.objects)
        return left and (self.index < self.limit or self._publishable)

    def next_extent(self, most_blocks: int, most_bytes: int) -> CallExtent:
        """The next batch under the caps; without layers, once all is at the backend and committed in the arena."""
        if self._publishable:
            return CallExtent(0, len(self.objects), self.layers, self.layers, 0)
        return HostTransfer.next_extent(self, most_blocks, most_bytes)

    def advance(self, extent: CallExtent) -> None:
        """Move the cursor past `extent`."""
        self.publishing = extent.layer_lo == self.layers
        HostTransfer.advance(self, extent)

    @property
    def _publishable(self) -> bool:
        return self.index == self.layers and not self.calls and self.save is None and not self.publishing

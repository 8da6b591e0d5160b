"""What the core is told. Times are seconds on the caller's monotonic clock.

Blocks of a step are numbered per direction and group: the blocks of the group's parts, one part
after the other in the order given. Batches and failures name ranges of these numbers, so that the
core never holds anything per block.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from layerflow.flow.host_events import (
    CallDone,
    FetchAvailable,
    FetchesRevoked,
    FetchFailed,
    FetchLeased,
    FetchOpened,
    HostLost,
    WriteOpened,
    WritesRevoked,
)
from layerflow.flow.limits import Limits


class Direction(enum.IntEnum):
    """Which way bytes move between engine memory and arena."""

    LOAD = 0
    SAVE = 1


# Bound once: finding a member in its class costs some 30 ns, several times an event.
LOAD: Final = Direction.LOAD
SAVE: Final = Direction.SAVE


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the core knows of one layer: its group and the bytes of one block."""

    group: int
    block_bytes: int


class Need(NamedTuple):
    """Blocks `lo` to `hi` of a load part come with object number `item` of fetch `fetch`; of a follow, if below 0."""

    fetch: int
    item: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Part:
    """One request's blocks of one group within a step, in one direction.

    :param needs: loads: the blocks whose objects are still being fetched, ascending; all others are in the arena.
    :param promised: saves: somebody counts on them: they are not shed.
    """

    request: str
    group: int
    blocks: int
    needs: tuple[Need, ...] = ()
    promised: bool = False


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An engine worker attached.

    :param session: numbers ascend and are never reused, so that a late report is told from an impossible one.
    """

    session: int
    layers: tuple[LayerShape, ...]


@dataclass(frozen=True, slots=True)
class SessionLost:
    """An engine worker is gone, and with it everything that could touch its memory."""

    session: int


@dataclass(frozen=True, slots=True)
class StepOpened:
    """A forward pass begins (or is about to).

    :param deadline: when unfinished loads fail.
    :param save_deadline: when unfinished saves are revoked.
    :param planned: the worker has the places of all loads and moves them itself, under a window of its own: they are
        granted no batches, and end with :class:`LoadsMoved`.
    """

    session: int
    step: int
    deadline: float
    save_deadline: float
    loads: tuple[Part, ...] = ()
    saves: tuple[Part, ...] = ()
    planned: bool = False


@dataclass(frozen=True, slots=True)
class FollowOpened:
    """Objects of one group that a step saves, or that are to be saved, are loaded by others as they are stored.

    They lie where the save stores them. Loads name them in their needs, as objects of a fetch.

    :param follow: numbers descend from -1 and are never reused.
    :param layers: the model's layer numbers of the group, ascending.
    :param objects: how many.
    :param session: with `step` and `group`: of the save. :param parts: of each object, its position in
        ``StepOpened.saves``; empty = no step saves them yet.
    :param lent: see :class:`FollowLent`.
    """

    follow: int
    layers: tuple[int, ...]
    objects: int
    session: int = -1
    step: int = -1
    group: int = -1
    parts: tuple[int, ...] = ()
    lent: bool = False


@dataclass(frozen=True, slots=True)
class FollowLent:
    """Another server reads objects of a follow as they are stored, or no longer does.

    While it is lent, what is stored of it is told of, and what is given up keeps its room.
    """

    follow: int
    lent: bool


@dataclass(frozen=True, slots=True)
class FollowMoved:
    """Objects that no step saved are saved by one now, or fetched: they are those of `into`, in this order.

    :param objects: of `follow`, which was opened without parts.
    :param into: another follow, or a fetch, that has just been opened for them.
    """

    follow: int
    objects: tuple[int, ...]
    into: int


@dataclass(frozen=True, slots=True)
class FollowLost:
    """Nobody will save these objects of a follow that was opened without parts."""

    follow: int
    objects: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FrontierReached:
    """Attention of `layer` has started (and of every layer before it)."""

    session: int
    step: int
    layer: int


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The first `count` layers have written their KV."""

    session: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Every byte of the batch is in place."""

    session: int
    batch: int


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The batch was not (wholly) copied and its lane will not touch it any more."""

    session: int
    batch: int
    reason: str


class FailedRange(NamedTuple):
    """Blocks `lo` to `hi` of a group's loads have not arrived in full."""

    group: int
    lo: int
    hi: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadsMoved:
    """Nothing of a planned step's loads moves any more: every byte is in place, but for what has failed.

    :param nbytes: that arrived.
    """

    session: int
    step: int
    nbytes: int
    failed: tuple[FailedRange, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadsFenced:
    """The engine's wait ended without its bytes: no load batch of this step runs any more.

    Each batch granted and unfinished is also reported as failed.
    """

    session: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepClosed:
    """The forward pass ended.

    Not `ok`: layers that have not been computed never will be, and unfinished loads fail. A step lives
    until it is closed or both its deadlines have passed.
    """

    session: int
    step: int
    ok: bool


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The request is over; its blocks are wanted back."""

    session: int
    request: str


@dataclass(frozen=True, slots=True)
class StepsRevoked:
    """Nothing that the session's open steps save is published any more; with `loads`, what they load has failed."""

    session: int
    loads: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """New caps, valid for every batch from now on."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; a deadline may have."""


Event = (
    SessionOpened
    | SessionLost
    | StepOpened
    | FetchOpened
    | FetchAvailable
    | FetchFailed
    | FetchLeased
    | FollowOpened
    | FollowLent
    | FollowMoved
    | FollowLost
    | WriteOpened
    | WritesRevoked
    | CallDone
    | FetchesRevoked
    | HostLost
    | FrontierReached
    | LayersComputed
    | BatchDone
    | BatchFailed
    | LoadsMoved
    | LoadsFenced
    | StepClosed
    | RequestAborted
    | StepsRevoked
    | LimitsChanged
    | Tick
)

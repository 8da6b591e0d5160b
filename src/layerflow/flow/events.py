"""What the core is told. Times are seconds on the caller's monotonic clock.

Blocks of a step are numbered per direction and group: the blocks of the group's parts, one part
after the other in the order given. Batches and failures name ranges of these numbers, so that the
core never holds anything per block.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

# What the core is told of hosts: objects on their way between the arena and a backend, or from a peer's arena.


class Hop(enum.IntEnum):
    """Which way objects go: from the backend into the arena, to it, or from a peer's arena into this one.

    Transfers of :data:`FETCH` and :data:`PEER` are fetches alike; each of the first three hops has a host, calls and
    call sizes of its own. :data:`LOCAL` is the way of follows: a step stores the objects where they lie.
    """

    FETCH = 0
    WRITE = 1
    PEER = 2
    LOCAL = 3


class Item(NamedTuple):
    """One object of a transfer between arena and backend: the bytes and blocks of each of its layers."""

    layer_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchOpened:
    """Objects of one group are to be brought into the arena, where they have room.

    It runs until all of it has come, unless it was wanted (leased, or needed by a step's loads) and no longer is.

    :param fetch: numbers of fetches and follows together ascend and are never reused.
    :param engine: who it is for; engines share the host evenly.
    :param layers: the model's layer numbers of the group, ascending.
    :param available: so many layers can be fetched now, more as :class:`FetchAvailable` says; -1 = all.
    :param hop: where from: the backend, or a peer.
    """

    fetch: int
    engine: str
    layers: tuple[int, ...]
    objects: tuple[Item, ...]
    available: int = -1
    hop: Hop = Hop.FETCH


@dataclass(frozen=True, slots=True)
class FetchAvailable:
    """The first `layers` layers of all objects of a fetch can be fetched: its source has stored them."""

    fetch: int
    layers: int


@dataclass(frozen=True, slots=True)
class IncomingFailed:
    """Objects of a fetch or follow, ``(position, why)``, will not come, whatever a host is doing with them.

    Of a follow, only while no step saves them: what becomes of a step's saves the core knows by itself.
    """

    incoming: int
    failed: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class IncomingLeased:
    """Somebody leases objects of a fetch (lookups) or of a follow (another server), or nobody does any more.

    A fetch goes on while it is leased, though no load needs it. While a follow is leased, :class:`.LayersStored`
    tells how far it has come, and what is given up of it keeps its room.
    """

    incoming: int
    leased: bool


@dataclass(frozen=True, slots=True)
class WriteOpened:
    """Objects that a step saves of one group are to be written to the backend, layer by layer as they are stored.

    They are published there once they are committed in the arena; those of revoked parts are given up.

    :param write: numbers ascend and are never reused.
    :param engine: who it is for; engines share the host evenly.
    :param parts: of each object, its position in ``StepOpened.saves``.
    """

    write: int
    engine: str
    session: int
    step: int
    group: int
    objects: tuple[Item, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritesRevoked:
    """Nothing that is on its way to the backend now may be published there, as far as the host hears of it in time."""

    reason: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The host has ended a call: its layers have moved, or its objects are published, but for those that failed.

    :param failed: positions in the transfer, of this call or not, with what happened.
    """

    hop: Hop
    call: int
    failed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchesRevoked:
    """Nothing that is on its way from the backend now may be published, whenever the host ends it.

    :param unwanted: only what no lease and no living load wants.
    """

    reason: str
    unwanted: bool = False


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host process is dead: nothing of it touches the arena, and nothing that it carried will end.

    :param hops: what it moved.
    """

    reason: str
    hops: tuple[Hop, ...] = (Hop.FETCH, Hop.WRITE)


# The caps that the core keeps to.


@dataclass(frozen=True, slots=True)
class Limits:
    """The caps. All may change while steps are in flight.

    :param prefetch_layers: loads move at most so many layers past the frontier; 0 = bounded by bytes only.
    :param max_transfer_blocks: blocks of one batch.
    :param max_transfer_bytes: bytes of one batch; a single larger block is split by bytes. A load takes at most
        half of `max_granted_bytes`, a save or a load under `prefetch_layers` at most a quarter.
    :param max_granted_bytes: bytes granted and not yet reported, over all sessions, both directions; at
        least 2. Saves are granted up to half of it. What cannot move yet is counted, and never takes all of
        its direction's half. Not counted: what was called back at a deadline, a fence or a failed forward
        pass, until it is reported.
    :param save_backlog_bytes: a step whose saves would take a session's unsaved bytes past this has
        them shed.
    :param write_backlog_bytes: what is on its way to the backend is at most so much; what finds no room when its
        first layer is stored is shed.
    :param stagger_us: distance of neighbouring stagger slots, which lanes keep; 0 = off.
    :param fetch_timeout_s: a fetch of which nothing has come for so long is given up.

    The caps of batches and of what is in flight hold for each hop: between engines and arena, from the
    backend, and to it. There the smallest batch is one layer of one object, whatever the caps.
    """

    prefetch_layers: int = 0
    max_transfer_blocks: int = 4096
    max_transfer_bytes: int = 64 << 20
    max_granted_bytes: int = 256 << 20
    save_backlog_bytes: int = 4 << 30
    write_backlog_bytes: int = 1 << 30
    stagger_us: int = 0
    fetch_timeout_s: float = 10.0


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
    """Blocks `lo` to `hi` of a load part come with object number `item` of the fetch or follow `incoming`."""

    incoming: int
    item: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Part:
    """One request's blocks of one group within a step, in one direction.

    :param needs: loads: the blocks whose objects are still being fetched, ascending; all others are in the arena.
    :param awaited: saves: somebody counts on them: they are not shed.
    """

    request: str
    group: int
    blocks: int
    needs: tuple[Need, ...] = ()
    awaited: bool = False


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

    :param follow: numbers of fetches and follows together ascend and are never reused.
    :param layers: the model's layer numbers of the group, ascending.
    :param objects: how many.
    :param session: with `step` and `group`: of the save. :param parts: of each object, its position in
        ``StepOpened.saves``; empty = no step saves them yet.
    :param leased: see :class:`IncomingLeased`.
    """

    follow: int
    layers: tuple[int, ...]
    objects: int
    session: int = -1
    step: int = -1
    group: int = -1
    parts: tuple[int, ...] = ()
    leased: bool = False


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
class LoadsLost:
    """Some of what has failed of a planned step's loads. Their end follows: many ranges are told in several events."""

    session: int
    step: int
    failed: tuple[FailedRange, ...]


@dataclass(frozen=True, slots=True)
class LoadsMoved:
    """Nothing of a planned step's loads moves any more: every byte is in place, but for what has failed.

    :param nbytes: that arrived.
    :param failed: what was not told by :class:`LoadsLost`.
    :param lost_ranges: how many were: where one of those events was impossible, this one is too, unless the loads were
        cut off, and so all failed, before.
    """

    session: int
    step: int
    nbytes: int
    failed: tuple[FailedRange, ...] = ()
    lost_ranges: int = 0


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
    | FollowOpened
    | FollowMoved
    | IncomingFailed
    | IncomingLeased
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
    | LoadsLost
)

"""What the server says to an agent or a control client: numbers from 101 on."""

from __future__ import annotations

from typing import ClassVar

from layerflow.wire.messages.base import Beat, Message
from layerflow.wire.messages.peers import (
    PeerBeat,
    PeerCompared,
    PeerFound,
    PeerHandoffState,
    PeerPartitions,
    PeerProgress,
    PeerWelcome,
)


class Welcome(Message, frozen=True, tag=101):
    """The hello was accepted.

    :param fd_server: path of the Unix socket that hands out shared memory; empty where there is none.
    :param token: 16 bytes to send there first, and one that says what is wanted.
    :param direct: JSON, the options of a client of the pool behind the arena, for workers that may reach it from
        device memory; empty where they may not.
    """

    session: int
    version: str
    fd_server: str
    token: bytes
    heartbeat_ms: int
    liveness_ms: int
    lease_ms: int
    direct: str = ""


class Terms(Message, frozen=True, tag=107):
    """The settings an agent works under; sent again whenever they change.

    :param max_transfer_blocks: what one copy moves at most, over all of its layers; `max_transfer_bytes` likewise.
    :param stagger_us: distance of the slots in which tensor-parallel ranks begin their loads; 0 = off.
    :param follow: ``pd.follow``: lookups say how long they may wait where it is ``auto``.
    :param window_bytes: what a worker may have in flight of loads that it moves by the plans of its hits; 0 = it moves
        none.
    :param copy_way: ``transfer.copy_way``: how blocks move to and from a device.
    """

    step_timeout_ms: int
    save_timeout_ms: int
    prefetch_layers: int
    mode: str
    save_partial: bool
    save_decode: bool
    link_gbps: float
    link_latency_us: int
    max_transfer_blocks: int = 4096
    max_transfer_bytes: int = 64 << 20
    stagger_us: int = 0
    follow: str = "asked"
    window_bytes: int = 0
    copy_way: str = "ranges"


class Attached(Message, frozen=True, tag=102):
    """The client's spec is known.

    :param arena_bytes: 0 without memory.
    :param incarnation: names this server's arena; plans of another name mean another memory.
    """

    arena_bytes: int
    terms: Terms
    incarnation: int = 0


class TailHit(Message, frozen=True):
    """A stored chunk that may continue the prompt: `tokens` tokens after `chunk` full chunks.

    :param shared: so many of its tokens are the prompt's, by the lookup's block digests. 0: all of them or none, which
        `digest` tells.
    """

    chunk: int
    tokens: int
    digest: bytes
    shared: int = 0


class Found(Message, frozen=True, tag=103):
    """The longest hit over all groups and shards.

    :param tokens: leading tokens that can be loaded, tails not counted; below the prompt's length.
    :param tails: longer hits: up to what is shared, and to all of it where the digest is that of the prompt's tokens.
    :param following: some of it is still being stored: the step that loads it follows that, layer by layer.
    :param reason: of a Lookup with a hand-off that it does not follow: the hand-off's state, and why.
    :param plan: above 0: the hit brings its plan, of this number: everything that one of these hits needs lies in the
        arena. What has a place is pinned until each worker of the engine has opened its steps with it, or until it is
        dropped.
    :param incarnation: of the arena in which they lie.
    :param places: of each object, a :data:`layerflow.places.PLACE`. By chunk, the hit's (of the longest tail's) first
        and then the tails; then by group, then by shard. What some of these hits do not need may have none.
    :param drafts: the layers of the engine's draft model are there too, for all of these; of specs that have some.
    """

    id: int
    tokens: int
    tails: list[TailHit]
    following: bool = False
    reason: str = ""
    plan: int = 0
    incarnation: int = 0
    places: bytes = b""
    drafts: bool = False


class PlanPart(Message, frozen=True):
    """Where each object of a part lies (its header's offset in the arena), or NOWHERE.

    :param stored: loads only: the blocks per layer that the object holds.
    """

    offsets: bytes
    stored: bytes


class Covered(Message, frozen=True):
    """An object that was not stored, and those that cover it.

    :param offset: what the plan names as its place: the first of `offsets`.
    :param boxes: of each of them, first and end layer within the group over all stages, first and end head.
    :param offsets: where their headers lie.
    """

    offset: int
    boxes: list[list[int]]
    offsets: list[int]


class Plan(Message, frozen=True, tag=104):
    """The answer to OpenStep: parts in the order of the request. Blocks of objects that are NOWHERE are not
    numbered; a load object that is NOWHERE has failed.

    :param urgent: another engine waits for what is saved: each layer leaves as soon as it is computed.
    """

    step: int
    loads: list[PlanPart]
    saves: list[PlanPart]
    covered: list[Covered] = []
    urgent: bool = False


class Batch(Message, frozen=True):
    """Copy blocks `lo` to `hi` of one layer; see :class:`layerflow.flow.commands.Submit`.

    :param gate: loads: start once the frontier has reached this layer; -1 = at once.
    """

    step: int
    batch: int
    direction: int
    layer: int
    lo: int
    hi: int
    byte_lo: int
    byte_hi: int
    nbytes: int
    gate: int
    seals: bool


class LayerSealed(Message, frozen=True):
    """No further batch comes for this layer."""

    step: int
    direction: int
    layer: int


class Failed(Message, frozen=True):
    """Blocks `lo` to `hi` of the group's loads will not arrive."""

    step: int
    request: str
    group: int
    lo: int
    hi: int
    reason: str


class Cancelled(Message, frozen=True):
    """Drop what has not started of this step and direction."""

    step: int
    direction: int
    reason: str


class Grant(Message, frozen=True, tag=105):
    """Work, in the order in which it should run."""

    batches: list[Batch] = []
    sealed: list[LayerSealed] = []
    failed: list[Failed] = []
    cancelled: list[Cancelled] = []


class Stored(Message, frozen=True):
    """The end of save parts (positions in OpenStep.saves): published, or given back for `reason`.

    What had room for some of its objects only is told both ways, published first.
    """

    step: int
    parts: list[int]
    committed: bool
    reason: str


class Notice(Message, frozen=True, tag=106):
    """What ended: saves, aborted requests whose blocks are free, and steps."""

    stored: list[Stored] = []
    released: list[str] = []
    finished: list[int] = []


class Status(Message, frozen=True, tag=108):
    """The server's state as JSON."""

    id: int
    json: bytes


class HandoffState(Message, frozen=True, tag=109):
    """Where a hand-off is.

    :param id: of the OpenHandoff or WatchHandoff.
    :param state: ``announced`` (a reader has asked for it, nobody has opened it), ``open``, ``complete``, ``failed``,
        ``revoked`` (the server took it back), ``released``, or ``refused`` (never opened).
    :param tokens: that a reader can load at most; 0 = nothing.
    :param reason: of ``failed``, ``revoked`` and ``refused``.
    """

    id: int
    handoff: str
    state: str
    tokens: int = 0
    reason: str = ""


class ChunkChange(Message, frozen=True):
    """Where a described chunk is now.

    :param states: a byte for each group: 0 = gone, 1 = all of it in the arena, 2 = some only behind the arena.
    :param parent: and what follows, as of ChunkDescription; empty where the chunk is gone.
    """

    digest: bytes
    states: bytes
    parent: bytes = b""
    tokens: bytes = b""
    extra: bytes = b""


class ChunkChanges(Message, frozen=True, tag=111):
    """The next changes, oldest first.

    :param epoch: of this server's notes. Another one than before, or 0 changes with `upto` = 0: read from 0, and take
        for gone what is not told again.
    :param upto: read on behind this. :param begun: goes with the next question. :param more: there is more to be read.
    """

    needs_version: ClassVar[int] = 2

    id: int
    epoch: int
    upto: int
    begun: int
    more: bool
    chunks: list[ChunkChange] = []


class Problem(Message, frozen=True, tag=199):
    """A message was refused and changed nothing. `id` repeats the request's id or step, -1 without one."""

    id: int
    code: str
    message: str


class SpansWanted(Message, frozen=True, tag=110):
    """Tell what took time in the last steps. Answered by Spans; a worker keeps 64 steps.

    :param after: of the steps that the worker has measured, those behind the first so many.
    :param since: those that ended at this time or later.
    """

    id: int
    after: int
    since: float


ToClient = (
    Welcome
    | Attached
    | Terms
    | Found
    | Plan
    | Grant
    | Notice
    | Beat
    | Status
    | HandoffState
    | SpansWanted
    | ChunkChanges
    | Problem
    | PeerWelcome
    | PeerFound
    | PeerProgress
    | PeerBeat
    | PeerCompared
    | PeerPartitions
    | PeerHandoffState
)

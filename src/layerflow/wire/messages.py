"""Every message of the control protocol, with its number. Numbers are never reused.

On the wire a message is one msgpack array ``[number, field, field, ...]`` in the order given here.
Lists of integers travel as little-endian bytes: ``digests`` are 16 bytes each, ``counts``, ``tokens``
and ``stored`` are uint32, ``offsets`` are uint64. Times are seconds on CLOCK_MONOTONIC, which all
processes of one machine share.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from layerflow.spec import ModelSpec

NOWHERE = 2**64 - 1
"""The offset of an object that is not there (load) or need not be written (save)."""


BROKEN = "broken"
"""How a Failure's reason begins when the load failed because of the object itself: it is hidden from lookup."""


WANT_ARENA, WANT_PRESENCE = b"a", b"p"
"""The byte after the token at the fd server: which descriptor the client asks for."""


QUIET = b"q"
"""What a client says at the fd server before it hangs up: it touches the shared memory no more."""


STRANGER = "stranger"
"""Code of the Problem for a client that the server does not know: greet and say hello (again)."""


MAX_NAME, MAX_REASON = 1024, 65_536
"""Characters of a name (of a request, an engine) and of a reason that a client gives."""

MAX_PARTS, MAX_ITEMS = 16_384, 65_536
"""Load or save parts of one OpenStep, and items of any other list in a message to the server."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Few = msgspec.Meta(max_length=MAX_PARTS)
_Many = msgspec.Meta(max_length=MAX_ITEMS)


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages."""


# -- from an agent or control client to the server ------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """Who is speaking. `engine` names the serving engine; its ranks and scheduler share it."""

    engine: Name
    client: Name
    pid: int


class Attach(Message, frozen=True, tag=2):
    """What this client caches. With `memory`, an engine worker that moves bytes: it must have fetched
    the arena with the token of its Welcome before; without, a scheduler that only looks up.

    :param direct: it moves bytes straight between engine memory and the pool behind the arena, by a client of its
        own, made from the options of its Welcome. Offsets of its plans mean nothing.
    """

    spec: ModelSpec
    memory: bool
    direct: bool = False


class Lookup(Message, frozen=True, tag=3):
    """How many leading tokens of a prompt can be loaded? Answered by Found.

    :param digests: of the prompt's full chunks.
    :param root: the chain's root.
    :param tokens: length of the prompt.
    :param lease_ms: how long the hit stays pinned.
    :param tail: digest of what the full chunks leave of the prompt; empty where they leave nothing. Stored tails of
        other lengths are offered by Found; this one is found however many there are.
    :param written_ms: above 0, another question: of how many tokens does the pool or disk behind the arena have
        everything, for a hand-off to another node? What is on its way there is waited for, at most so long; what is not
        (any more), because its write was shed or has failed, does not count. Nothing is leased or fetched.
    """

    id: int
    request: Name
    root: bytes
    digests: bytes
    tokens: int
    lease_ms: int
    tail: bytes
    written_ms: int = 0


class LoadPart(Message, frozen=True):
    """One request's loads of one group: per object its chunk digest and the blocks wanted of it.

    :param tail: tokens of the last object, where that is a partial tail; else 0.
    :param parent: digest before it, where it is one; else empty.
    """

    request: Name
    group: int
    digests: bytes
    counts: bytes
    tail: int
    parent: bytes


class SavePart(Message, frozen=True):
    """One request's saves of one group: per object its chunk digest, blocks and tokens.

    :param parent: digest before the last object, when that object is a partial tail; else empty.
    """

    request: Name
    group: int
    digests: bytes
    counts: bytes
    tokens: bytes
    parent: bytes


class OpenStep(Message, frozen=True, tag=4):
    """A forward pass begins. Answered by Plan, then Grants."""

    step: int
    deadline: float
    save_deadline: float
    loads: Annotated[list[LoadPart], _Few]
    saves: Annotated[list[SavePart], _Few]


class Failure(Message, frozen=True):
    """A batch that was not (wholly) copied and will not be."""

    batch: int
    reason: Reason


class Fence(Message, frozen=True):
    """The step's waits have failed; no load batch of it runs any more."""

    step: int
    reason: Reason


class Progress(Message, frozen=True):
    """Where a step is: the highest layer whose attention started, and how many layers are computed."""

    step: int
    frontier: int
    computed: int


class Closed(Message, frozen=True):
    """A forward pass ended; not `ok`: some layers were never computed."""

    step: int
    ok: bool


class Figures(Message, frozen=True):
    """What a finished step measured. Times in seconds; see the step trace for the formulas."""

    step: int
    load_bytes: int
    load_transfer_s: float
    load_exposed_s: float
    save_bytes: int
    save_transfer_s: float
    save_exposed_s: float


class Report(Message, frozen=True, tag=5):
    """Coalesced news of an agent's lanes and steps."""

    done: Annotated[list[int], _Many] = []
    failed: Annotated[list[Failure], _Many] = []
    fenced: Annotated[list[Fence], _Many] = []
    progress: Annotated[list[Progress], _Many] = []
    closed: Annotated[list[Closed], _Many] = []
    figures: Annotated[list[Figures], _Many] = []


class Abort(Message, frozen=True, tag=6):
    """These requests are over. Answered by a Notice that releases each once nothing touches its blocks."""

    requests: Annotated[list[Name], _Many]


class Beat(Message, frozen=True, tag=7):
    """Still here. Answered by a Beat with the same `sent`."""

    sent: float


class StatusRequest(Message, frozen=True, tag=8):
    """Answered by Status."""

    id: int


class DropLease(Message, frozen=True, tag=9):
    """The request will not be loaded; its lookup's pins may go."""

    request: Name


class Bye(Message, frozen=True, tag=10):
    """The client leaves in peace."""


class Purge(Message, frozen=True, tag=11):
    """Forget every object of the arena, and what is being saved or fetched. Answered by Status.

    :param tier: also remove what lies in the pool behind the arena, as far as this server can.
    """

    id: int
    tier: bool = False


class Missed(Message, frozen=True, tag=12):
    """Lookups that the presence table has answered, so that they are counted: how many, of how many tokens."""

    requests: int
    tokens: int


class Reset(Message, frozen=True, tag=13):
    """The weights of the client's engine are being replaced. Answered by Status once nothing that any session of this
    engine has under way can be loaded or published any more, and its leases are dropped."""

    id: int


# -- from the server ------------------------------------------------------------------------------


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


class Attached(Message, frozen=True, tag=102):
    """The client's spec is known. `arena_bytes` is 0 without memory."""

    arena_bytes: int
    terms: Terms


class TailHit(Message, frozen=True):
    """A stored partial chunk that may continue the prompt: its first `tokens` tokens after `chunk` full chunks."""

    chunk: int
    tokens: int
    digest: bytes


class Found(Message, frozen=True, tag=103):
    """The longest hit over all groups and shards.

    :param tokens: leading tokens that can be loaded, tails not counted; below the prompt's length.
    :param tails: longer hits, longest first, valid where the digest is that of the prompt's own tokens.
    """

    id: int
    tokens: int
    tails: list[TailHit]


class PlanPart(Message, frozen=True):
    """Where each object of a part lies (its header's offset in the arena), or NOWHERE.

    :param stored: loads only: the blocks per layer that the object holds.
    """

    offsets: bytes
    stored: bytes


class Plan(Message, frozen=True, tag=104):
    """The answer to OpenStep: parts in the order of the request. Blocks of objects that are NOWHERE are not
    numbered; a load object that is NOWHERE has failed."""

    step: int
    loads: list[PlanPart]
    saves: list[PlanPart]


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
    """The end of save parts (positions in OpenStep.saves): published, or given back for `reason`."""

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


class Problem(Message, frozen=True, tag=199):
    """A message was refused and changed nothing. `id` repeats the request's id or step, -1 without one."""

    id: int
    code: str
    message: str


ToServer = (
    Hello
    | Attach
    | Lookup
    | OpenStep
    | Report
    | Abort
    | Beat
    | StatusRequest
    | DropLease
    | Bye
    | Purge
    | Missed
    | Reset
)
ToClient = Welcome | Attached | Terms | Found | Plan | Grant | Notice | Beat | Status | Problem

"""What an agent or a control client says to the server: numbers 1 to 99."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from layerflow.spec import ModelSpec
from layerflow.wire.messages.base import Beat, Few, Many, Message, Name, Reason, Servers
from layerflow.wire.messages.peers import (
    PeerBeat,
    PeerCompare,
    PeerEndHandoff,
    PeerHello,
    PeerLookup,
    PeerOpenHandoff,
    PeerRelease,
    PeerReleaseHandoff,
)


class Hello(Message, frozen=True, tag=1):
    """Who is speaking. `engine` identifies the serving engine; its ranks and scheduler share it.

    :param name: what the engine is called in status, logs and metrics, best the same after a restart; empty = `engine`.
    :param version: of layerflow; empty = it was not told.
    """

    engine: Name
    client: Name
    pid: int
    name: Name = ""
    version: Name = ""


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
    :param block_digests: of the prompt's chunks from chunk `blocks_from` on, the last and partial one included: the
        digest after each block, as in :class:`SavePart`. Of those chunks the hit may end at a block. A client that
        sees where the prompt leaves what is stored sends that chunk's alone.
    :param handoff: the hit may be on what this hand-off is still to store. The answer comes once it is open, has failed
        or is over, at the latest after `follow_ms`; then, as after a failure, what is stored counts and nothing else.
    :param servers: control addresses of the servers that keep it, each a part; empty = the one that is asked.
    :param follow_ms: how long what is not stored yet may be waited for. Without a hand-off: the hit may be on what
        another engine is storing now, if that is expected to be stored so soon; 0 = it may not.
    :param compute_ms: how long computing the prompt would take, by the client's own measure; what peers have and would
        take longer is no hit. 0 = not known.
    """

    id: int
    request: Name
    root: bytes
    digests: bytes
    tokens: int
    lease_ms: int
    tail: bytes
    written_ms: int = 0
    block_digests: bytes = b""
    blocks_from: int = 0
    handoff: Name = ""
    servers: Servers = []
    follow_ms: int = 0
    compute_ms: int = 0


class LoadPart(Message, frozen=True):
    """One request's loads of one group: per object its chunk digest and the blocks wanted of it.

    :param tail: tokens of the last object, where that is a partial tail; else 0.
    :param parent: digest before it, where it is one; else empty.
    :param plan: number of the plan that its places are from; 0 = it has none.
    :param more: this worker will open another step with that plan.
    """

    request: Name
    group: int
    digests: bytes
    counts: bytes
    tail: int
    parent: bytes
    plan: int = 0
    more: bool = False


class SavePart(Message, frozen=True):
    """One request's saves of one group: per object its chunk digest, blocks and tokens.

    :param parent: digest before the last object, when that object is a partial tail; else empty.
    :param block_digests: of the first group: of each object, one after the other, the digest after each of its blocks
        (of as many tokens as every group has whole blocks of), so that a prompt which parts from it in its middle hits
        to the block. Empty: they hit only as a whole.
    """

    request: Name
    group: int
    digests: bytes
    counts: bytes
    tokens: bytes
    parent: bytes
    block_digests: bytes = b""


class OpenStep(Message, frozen=True, tag=4):
    """A forward pass begins. Answered by Plan, then Grants.

    :param planned: the worker moves all loads by itself, by the plans that they name. Then Plan says nothing of loads,
        no batch of them is granted, and a Report says when they have ended.
    """

    step: int
    deadline: float
    save_deadline: float
    loads: Annotated[list[LoadPart], Few]
    saves: Annotated[list[SavePart], Few]
    planned: bool = False


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
    """What a finished step measured. Times in seconds; see the step trace for the formulas.

    :param new_tokens: that the step computed, where its saves tell; 0 = not known.
    :param context_tokens: before them: so many as make one request's attention cost the same.
    :param layer_s: compute time of one layer; 0 = not known.
    """

    step: int
    load_bytes: int
    load_transfer_s: float
    load_exposed_s: float
    save_bytes: int
    save_transfer_s: float
    save_exposed_s: float
    new_tokens: int = 0
    context_tokens: int = 0
    layer_s: float = 0.0


class LostBlocks(Message, frozen=True):
    """Blocks `lo` to `hi`, of a group's loads, that have not arrived."""

    group: int
    lo: int
    hi: int
    reason: Reason


class Moved(Message, frozen=True):
    """Nothing of a planned step's loads moves any more: `nbytes` have arrived, and all but what was lost."""

    step: int
    nbytes: int
    lost: Annotated[list[LostBlocks], Many]


class Report(Message, frozen=True, tag=5):
    """Coalesced news of an agent's lanes and steps."""

    done: Annotated[list[int], Many] = []
    failed: Annotated[list[Failure], Many] = []
    fenced: Annotated[list[Fence], Many] = []
    progress: Annotated[list[Progress], Many] = []
    closed: Annotated[list[Closed], Many] = []
    figures: Annotated[list[Figures], Many] = []
    moved: Annotated[list[Moved], Many] = []


class Abort(Message, frozen=True, tag=6):
    """These requests are over. Answered by a Notice that releases each once nothing touches its blocks."""

    requests: Annotated[list[Name], Many]


class StatusRequest(Message, frozen=True, tag=8):
    """Answered by Status."""

    id: int


class DropLease(Message, frozen=True, tag=9):
    """The request will not be loaded; its lookup's pins may go.

    :param plan: the plan that is not used and never will be; 0 = leases of the request alone; -1 = also every plan that
        this client was told for the request and no worker has used.
    :param lease_ms: above 0: that plan has been given up, but its objects may be loaded all the same: they are leased
        for so long.
    """

    request: Name
    plan: int = -1
    lease_ms: int = 0


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


class OpenHandoff(Message, frozen=True, tag=14):
    """The client's engine is about to compute a prompt for another one. Answered by HandoffState: open, or refused.

    Room is reserved for what a hit of `tokens` needs and is not stored; what is stored is pinned.

    :param handoff: any name that nobody else uses, known to both engines.
    :param root: of the prompt's chain; `digests` and `tail` as in :class:`Lookup`.
    :param tokens: that the engine computes and saves.
    :param lease_ms: how long it is kept for a reader once it is complete, and after each that came; 0 =
        ``pd.handoff_lease_s``.
    :param timeout_ms: it has failed if it is not complete by then.
    :param servers: control addresses of other servers to which workers of this engine are attached: each keeps the part
        of its own ones. It is open once all of them have opened it, and fails with the first part that does.
    """

    id: int
    handoff: Name
    root: bytes
    digests: bytes
    tokens: int
    tail: bytes
    lease_ms: int
    timeout_ms: int
    servers: Servers = []


class EndHandoff(Message, frozen=True, tag=15):
    """The engine computes nothing more of it, or will not open it. No answer.

    :param tokens: that it has computed. Fewer than it was opened with: the hand-off has failed.
    :param reason: why it has failed, or is not opened; empty = it is complete once all of it is stored.
    """

    handoff: Name
    tokens: int
    reason: Reason = ""


class ReleaseHandoff(Message, frozen=True, tag=16):
    """Nobody needs this hand-off any more; what it pins goes. No answer.

    :param servers: control addresses of the servers that keep it, where they are others.
    """

    handoff: Name
    servers: Servers = []


class WatchHandoff(Message, frozen=True, tag=17):
    """Tell what becomes of a hand-off. Answered by HandoffState when it is more than announced, and again at its end.

    :param deadline_ms: then the state is told as it is.
    """

    id: int
    handoff: Name
    deadline_ms: int


class RecordRequest(Message, frozen=True, tag=18):
    """Record what happens in the server. Answered by Status: what ``recording`` of the server's status says.

    :param path: absolute, on the server's machine; empty = end the recording that such a request has begun.
    :param seconds: the recording ends by itself after so long. :param max_bytes: size of the file.
    """

    id: int
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    seconds: float = 0.0
    max_bytes: int = 0


class TraceRequest(Message, frozen=True, tag=19):
    """What took time in the steps of engine workers. Answered by Status with ``{"steps": [...]}``, oldest first, each
    with its session, step, engine, origin in monotonic seconds, and spans in base64 as of :class:`Spans`.

    :param seconds: of steps that ended in the last so many. :param engine: by its name; empty = of all.
    """

    id: int
    seconds: float
    engine: Name = ""


MAX_SETTINGS_BYTES = 60_000
"""Of a configuration file that is tried: the message keeps within those that do not grow."""
MAX_TRIED_S = 3600.0
"""For so long one message may ask that settings are tried; a client that goes on says so again."""


class TrySettings(Message, frozen=True, tag=29):
    """Hold other settings for a while than the watched file's. Answered by Status: what ``trial`` of the server's
    status says. They end with their client, with an edit of the file, and after their time.

    :param content: of a file as ``layerflow run --config`` takes; empty = the watched file's own settings are
        held against other such requests. Only live keys may differ from the watched file's; its ``[record]`` and
        ``[log]`` hold on.
    :param seconds: from now on, at most :data:`MAX_TRIED_S`, also where something is tried already; 0 = end it.
    :param dry: only say what would change; nothing begins or ends, whatever `seconds` says.
    """

    needs_version: ClassVar[int] = 2

    id: int
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_SETTINGS_BYTES)] = b""
    seconds: float = 0.0
    dry: bool = False


class StepSpans(Message, frozen=True):
    """What took time in a step.

    :param origin: when the first of its spans begins.
    :param spans: 24 bytes each: lane (u8), emulated (u8), layer (i16), start and length in microseconds (u32 each),
        bytes (u64), blocks (u32).
    """

    step: int
    origin: float
    spans: Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Spans(Message, frozen=True, tag=28):
    """A worker's answer to SpansWanted, the last of several or one of the others.

    :param id: of the question. :param upto: the steps that this worker has measured so far.
    :param more: another part of the answer follows.
    """

    id: int
    upto: int
    steps: Annotated[list[StepSpans], Few]
    more: bool = False


class ChunkDescription(Message, frozen=True):
    """A chunk in an engine's words.

    :param digest: of the chunk, full or partial. :param parent: of the chunk before; empty = it is a prompt's first.
    :param extra: what else decides the engine's block hashes, in its own words; engines of the same model read them.
    """

    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    parent: Annotated[bytes, msgspec.Meta(max_length=16)]
    tokens: Annotated[bytes, msgspec.Meta(min_length=4, max_length=1 << 18)]
    extra: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class DescribeChunks(Message, frozen=True, tag=30):
    """What these chunks of the attached model hold, so that its engines can tell routers of them. No answer."""

    needs_version: ClassVar[int] = 2

    chunks: Annotated[list[ChunkDescription], msgspec.Meta(max_length=4096)]


class ReadChunks(Message, frozen=True, tag=31):
    """What has changed of the described chunks of the attached model? Answered by ChunkChanges.

    :param epoch: of the last answer; 0 = there was none. :param after: its `upto`. :param begun: its `begun`.
    """

    needs_version: ClassVar[int] = 2

    id: int
    epoch: int = 0
    after: int = 0
    begun: int = 0


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
    | OpenHandoff
    | EndHandoff
    | ReleaseHandoff
    | WatchHandoff
    | RecordRequest
    | TraceRequest
    | TrySettings
    | Spans
    | DescribeChunks
    | ReadChunks
    | PeerHello
    | PeerLookup
    | PeerRelease
    | PeerBeat
    | PeerCompare
    | PeerOpenHandoff
    | PeerEndHandoff
    | PeerReleaseHandoff
)

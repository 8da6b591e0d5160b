"""What two servers say to each other: numbers 20 to 39 to the one whose arena is read, 120 to 139 from it.

The reader connects to the owner's control socket, over ``ipc://`` or ``tcp://`` with CURVE, greets as every client and
says PeerHello. A lease is named by its owner; `token` is what the reader shows on the link that the bytes take.
Times are lengths, in milliseconds: the two machines share no clock. Keys are 24 bytes each.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from layerflow.spec import ModelSpec, Shard
from layerflow.wire.messages.base import MAX_ITEMS, Message, Name, Reason

INCARNATION_BYTES = 16
"""Of a server, and of its exporter: drawn at its start, so that one that was restarted is another."""
PEER_TOKEN_BYTES = 16
MAX_PEER_KEYS = 65_536
"""Keys of one PeerLookup."""

MAX_PEER_PARTITIONS = 4
"""Partitions of one model of which a PeerPartitions tells: the newest."""

MISSING, STORED, OPEN = 0, 1, 2
"""What the owner has of a key: nothing that it lends now, a whole object, or one that is being saved."""

Incarnation = Annotated[bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_PEER_KEYS * 24)]
Numbers = Annotated[list[int], msgspec.Meta(max_length=MAX_ITEMS)]


class PeerHello(Message, frozen=True, tag=20):
    """A server that wants to read. Answered by PeerWelcome.

    :param name: of the reader, for people. :param version: of layerflow; empty = it was not told.
    """

    name: Name
    incarnation: Incarnation
    pid: int
    version: Name = ""


class PeerLookup(Message, frozen=True, tag=21):
    """Which of these can be read? Answered by PeerFound.

    :param incarnation: of the owner, as the reader knows it.
    :param handoff: what they belong to; empty = nothing in particular.
    :param lease_ms: what is found stays in place so long, from when the owner answers, and no longer than it allows.
    :param wait_ms: with a hand-off: what is still to be stored is offered too, once the hand-off is open; the answer
        comes then, at the latest after so long. What is found is then the hand-off's business.
    """

    id: int
    incarnation: Incarnation
    keys: Keys
    lease_ms: int
    handoff: Name = ""
    wait_ms: int = 0


class PeerRelease(Message, frozen=True, tag=22):
    """The reader is done with a lease: nothing of it is read any more."""

    lease: int


class PeerBeat(Message, frozen=True, tag=23):
    """Still here; answered by the same `sent` with those of `renew` that were prolonged by their `lease_ms`."""

    sent: float
    renew: Numbers = []


class PeerCompare(Message, frozen=True, tag=24):
    """Would this model's objects mean the same at the owner? Answered by PeerCompared."""

    id: int
    spec: ModelSpec


class PeerOpenHandoff(Message, frozen=True, tag=25):
    """Keep a part of a hand-off: what workers of this engine that are attached to the owner store of it. Answered by
    PeerHandoffState, and again when the part is complete, and at its end.

    :param engine: whose workers they are. The other fields are those of OpenHandoff.
    """

    id: int
    incarnation: Incarnation
    engine: Name
    handoff: Name
    root: bytes
    digests: bytes
    tokens: int
    tail: bytes
    lease_ms: int
    timeout_ms: int


class PeerEndHandoff(Message, frozen=True, tag=26):
    """The engine computes nothing more of it, or another part has failed; as EndHandoff. No answer.

    :param reason: why it has failed: what is complete of it is taken back too.
    """

    engine: Name
    handoff: Name
    tokens: int
    reason: Reason = ""


class PeerReleaseHandoff(Message, frozen=True, tag=27):
    """Nobody needs this hand-off any more; what the owner keeps of it goes. No answer."""

    handoff: Name


class PeerEndpoint(Message, frozen=True):
    """A link on which bytes are read, as one reader is told of it.

    :param link: ``tcp``, ``mooncake`` or ``nixl``.
    :param address: ``host:port`` of the exporter; an empty host is that of the control address.
    :param reader: 16 bytes, the reader's name on the link. :param reader_key: 32 bytes, which the reader shows to know
        there; they never cross the link.
    """

    link: str
    address: str
    incarnation: bytes
    reader: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    reader_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class PeerWelcome(Message, frozen=True, tag=120):
    """The owner of an arena that may be read; again whenever its links change.

    :param endpoints: empty while there is no exporter.
    """

    version: str
    incarnation: bytes
    heartbeat_ms: int
    liveness_ms: int
    arena_bytes: int
    endpoints: list[PeerEndpoint]


class PeerFound(Message, frozen=True, tag=121):
    """What of the keys can be read, in their order.

    :param lease: 0 = nothing was found, and nothing is leased.
    :param token: 16 bytes that name the lease on the link.
    :param lease_key: 32 bytes, with which both ends tag what is read; they never cross the link.
    :param lease_ms: how long it lasts; no longer than was asked for.
    :param states: one byte each: :data:`MISSING`, :data:`STORED` or :data:`OPEN`.
    :param nbytes: u64 each, header included. :param blocks: u32 each, per layer. :param tokens: u32 each.
    :param layers: u32 each: of an open object, how many leading layers are stored.
    :param saves: u32 each: open objects of one number are stored layer by layer together.
    :param reason: why something that is there is not lent.
    :param failed: the hand-off that was asked for will never be whole there; what is lent is what is stored of it.
    """

    id: int
    lease: int
    token: bytes
    lease_ms: int
    states: bytes
    nbytes: bytes
    blocks: bytes
    tokens: bytes
    layers: bytes
    saves: bytes
    reason: str = ""
    failed: bool = False
    lease_key: bytes = b""


class PeerProgress(Message, frozen=True, tag=122):
    """News of open objects of a lease, or that all of it has ended.

    :param positions: u32 each: their places among the lookup's keys.
    :param layers: so many leading layers of each are stored.
    :param committed: they are whole. :param reason: why the lease has ended; "" = all is well.
    """

    lease: int
    positions: bytes
    layers: int
    committed: bool = False
    reason: Reason = ""


class PeerCompared(Message, frozen=True, tag=123):
    """:param difference: the first fact that differs, as a sentence; empty = none, or the owner knows no such model."""

    id: int
    difference: str


class PeerPartitions(Message, frozen=True, tag=124):
    """In which partitions (tensor and pipeline sizes) a model's workers store at the owner. Told by itself.

    So a reader of another size knows which objects may stand in for its own: before the first PeerFound, and whenever
    a worker of a new partition attaches there.

    :param model: fingerprint. :param partitions: the first shard of each, newest last.
    """

    model: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    partitions: Annotated[list[Shard], msgspec.Meta(max_length=MAX_PEER_PARTITIONS)]


class PeerHandoffState(Message, frozen=True, tag=125):
    """What became of the part of a hand-off that the owner keeps.

    :param id: of the PeerOpenHandoff. :param state: as of HandoffState.
    """

    id: int
    handoff: Name
    state: str
    reason: str = ""

"""What the server and a host process say to each other, over a socket pair that only the two of them have.

Frames of 4 bytes length (big-endian) and msgpack. Both ends are always of one version: the server
starts its hosts itself. Jobs are numbered by the server. Offsets and sizes are bytes, times
milliseconds; packed arrays are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from layerflow.errors import ProtocolError
from layerflow.keys import KEY_BYTES

MAX_FRAME_BYTES = 64 << 20
STOP_S = 8.0
"""What a host may take to stop: a quarter for calls under way; then memcache's client takes some 3 to 5 s to leave its
pool. After one that was killed instead, who joins may wait for a minute, or not reach all of the pool's memory. Only a
host that hangs takes all of it."""
_LENGTH = struct.Struct(">I")


class Objects(msgspec.Struct, array_like=True, frozen=True):
    """The objects of a job, all of one group.

    :param keys: 24 bytes each.
    :param offsets: u64 each: the header's place in the arena.
    :param blocks: u32 each.
    :param layer_bytes: u64 each.
    :param tokens: u32 each; 0 = unknown to the reader.
    :param parents: for partial chunks: (position, 24-byte key).
    :param block_digests: (position, digests): see :class:`layerflow.pool.base.NewObject`.
    :param origin: where they lie at a peer, see :class:`layerflow.wire.peer_link.Origin`; empty = at the backend.
    :param positions: u32 each: their places in the peer's lease; empty as `origin` is.
    """

    layers: int
    keys: bytes
    offsets: bytes
    blocks: bytes
    layer_bytes: bytes
    tokens: bytes
    parents: tuple[tuple[int, bytes], ...] = ()
    block_digests: tuple[tuple[int, bytes], ...] = ()
    origin: bytes = b""
    positions: bytes = b""


# To the host -----------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message. `options`: the backend's section of the configuration, JSON-ready."""

    backend: str
    options: dict[str, Any]


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Which of these are there?"""

    id: int
    keys: bytes
    timeout_ms: int


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Objects that will be brought into the arena, by the calls (:class:`Pull`) that follow."""

    id: int
    objects: Objects


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """Bring layers `layer_lo` to `layer_hi` of objects `lo` to `hi` of fetch `id`, in one call of the backend.

    Objects that have failed are left out. Calls are ended in order.
    """

    id: int
    call: int
    lo: int
    hi: int
    layer_lo: int
    layer_hi: int


class EndFetch(msgspec.Struct, tag="endfetch", frozen=True):
    """No call of fetch `id` follows: give back what it holds at the backend."""

    id: int


class Write(msgspec.Struct, tag="write", frozen=True):
    """Objects that will be written, by the calls (:class:`Push`) that follow: ask the pool for their room."""

    id: int
    objects: Objects


class Push(msgspec.Struct, tag="push", frozen=True):
    """Write layers `layer_lo` to `layer_hi` of objects `lo` to `hi` of write `id`, in one call of the backend.

    No layers (both are the number of layers): every one is written, and the headers are in the arena; publish them.
    Objects that have failed or were dropped are left out. Calls are ended in order.
    """

    id: int
    call: int
    lo: int
    hi: int
    layer_lo: int
    layer_hi: int


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """Drop these objects of write `id` (u32 positions): they will not be finished."""

    id: int
    positions: bytes


class EndWrite(msgspec.Struct, tag="endwrite", frozen=True):
    """No call of write `id` follows: give up what is not published."""

    id: int


class Clear(msgspec.Struct, tag="clear", frozen=True):
    """Remove every object of layerflow, or these (24-byte keys) where the backend cannot tell what it holds.

    :param last: no more keys follow under this number. What is not the last is answered at once, and removes nothing.
    """

    id: int
    keys: bytes
    timeout_ms: int
    last: bool = True


class Lend(msgspec.Struct, tag="lend", frozen=True):
    """To an exporter: who shows `token` may read these objects, from now until Withdraw.

    :param positions: u32 each, ascending: a reader names each object by its place among the keys that it has asked for.
    :param keys: 24 bytes each. :param offsets: u64 each: the header's place in the arena. :param nbytes: u64 each.
    :param blocks: u32 each; 0 = the object is being saved, and has no header yet.
    :param stored: u64 each: so many leading bytes may be read.
    :param lease_key: with which what is read is tagged.
    """

    lease: int
    token: bytes
    positions: bytes
    keys: bytes
    offsets: bytes
    nbytes: bytes
    blocks: bytes
    stored: bytes
    lease_key: bytes


class Extend(msgspec.Struct, tag="extend", frozen=True):
    """To an exporter: of these objects of a lease (u32 positions) so many leading bytes (u64 each) may be read."""

    lease: int
    positions: bytes
    stored: bytes


class Withdraw(msgspec.Struct, tag="withdraw", frozen=True):
    """To an exporter: nothing of a lease may be read any more. Answered by Withdrawn once nothing is."""

    lease: int


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Answered by the host's main thread."""

    id: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Close and exit, within :data:`STOP_S`."""


# To the server ---------------------------------------------------------------------------------


class ObjectFailure(msgspec.Struct, array_like=True, frozen=True):
    """One object of a job: an :class:`layerflow.hosts.backend.ObjectStatus` other than OK."""

    position: int
    outcome: int
    reason: str


class Up(msgspec.Struct, tag="up", frozen=True):
    """Attached, or reachable again. Said first of all, and after each Down.

    :param indexed: the backend has an index of its own and is not shared: the first time `Indexed` messages follow
        until one says `last`. From then on Evicted and more of Indexed, of what is published and of what is read of a
        slow index, keep the server's copy exact, whether the backend can be reached or not.
    :param generation: of that index. A server that has all of it needs nothing more.
    """

    details: dict[str, Any]
    indexed: bool = False
    generation: int = 0


class Down(msgspec.Struct, tag="down", frozen=True):
    """Unreachable. `fatal`: trying again will not help; the host exits."""

    reason: str
    fatal: bool = False


class Indexed(msgspec.Struct, tag="held", frozen=True):
    """What a backend with an index holds: keys (24 bytes each), blocks and tokens (u32 each), parents of tails, block
    digests. An object that is told again replaces what was told of it."""

    keys: bytes
    blocks: bytes
    tokens: bytes
    parents: tuple[tuple[int, bytes], ...] = ()
    last: bool = True
    block_digests: tuple[tuple[int, bytes], ...] = ()


class Evicted(msgspec.Struct, tag="gone", frozen=True):
    """Tell that these have left a backend with an index."""

    keys: bytes


class Present(msgspec.Struct, tag="found", frozen=True):
    """One byte per key asked for: 1 = there. `reason` is set where nothing could be learnt."""

    id: int
    present: bytes
    reason: str = ""


class Fetched(msgspec.Struct, tag="fetched", frozen=True):
    """Call `call` of fetch `id` has ended: its layers are in the arena, but for objects that failed.

    :param failed: of the whole fetch, since the call before.
    """

    id: int
    call: int
    failed: tuple[ObjectFailure, ...] = ()


class Written(msgspec.Struct, tag="written", frozen=True):
    """Call `call` of write `id` has ended: its layers are at the backend, or its objects published, but for those that
    failed. The arena is not read for it any more.

    :param failed: of the whole write, since the call before.
    """

    id: int
    call: int
    failed: tuple[ObjectFailure, ...] = ()


class Cleared(msgspec.Struct, tag="cleared", frozen=True):
    """Tell how many objects were removed; `reason` is set where others may be left. Answers each Clear."""

    id: int
    objects: int
    reason: str = ""


class Withdrawn(msgspec.Struct, tag="withdrawn", frozen=True):
    """From an exporter: no read of this lease is under way, and none will be."""

    lease: int


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to Ping, with the backend's latest statistics."""

    id: int
    statistics: dict[str, float]


ToHost = (
    Start
    | Ask
    | Fetch
    | Pull
    | EndFetch
    | Write
    | Push
    | Drop
    | EndWrite
    | Clear
    | Ping
    | Stop
    | Lend
    | Extend
    | Withdraw
)
ToServer = Up | Down | Indexed | Evicted | Present | Fetched | Written | Cleared | Pong | Withdrawn

_encoder = msgspec.msgpack.Encoder()
_to_host: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToHost | ToServer) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_to_host(body: bytes | memoryview) -> ToHost:
    """:raises ProtocolError: not a message to a host."""
    try:
        return _to_host.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message to a host: {error}") from None


def decode_to_server(body: bytes | memoryview) -> ToServer:
    """:raises ProtocolError: not a message of a host."""
    try:
        return _to_server.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message of a host: {error}") from None


class Frames:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by `data`, without their length.

        :raises ProtocolError: a frame is longer than any message can be.
        """
        pending = self._pending
        pending += data
        frames: list[bytes] = []
        at = 0
        while len(pending) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(pending, at)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes between server and host; at most {MAX_FRAME_BYTES}")
            if len(pending) - at < _LENGTH.size + length:
                break
            at += _LENGTH.size
            frames.append(bytes(pending[at : at + length]))
            at += length
        del pending[:at]
        return frames


def split_keys(packed: bytes) -> list[bytes]:
    """Keys of 24 bytes each.

    :raises ProtocolError: not a whole number of keys.
    """
    if len(packed) % KEY_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are no whole number of {KEY_BYTES}-byte keys")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

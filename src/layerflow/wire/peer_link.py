"""The link between an importer and an exporter: fixed frames over a byte stream, and where an object lies at a peer.

The importer says HELLO with the incarnation of the exporter that it was told of, and is answered with that of the one
that it has reached. Then it sends requests, each a REQUEST and `count` ITEMs, and is answered with a HEAD for each,
then the bytes of all whose status is :data:`READ`, one behind the other, then a TAIL for each of these. Only a TAIL
says that bytes are those of the object: the exporter still had the right to read them when it had. Integers are
little-endian.

A windowed link (mooncake, nixl) is told of its window with a WINDOW after the greeting. Its requests name a turn of it,
which the exporter fills before it answers with the HEADs; their statuses are final, no bytes follow and no TAIL. A turn
begins with a STAMP, which the library brings along: it was this exporter's window, filled for this request.
"""

from __future__ import annotations

import struct

import msgspec

from layerflow.errors import ProtocolError

LINK_VERSION = 1
LINK_MAGIC, REQUEST_MAGIC = b"LFPL", b"LFPR"
HELLO = struct.Struct("<4sHH16s")
"""Magic, version, 0, incarnation."""
REQUEST = struct.Struct("<4sI16sQ")
"""Magic, count of items, token of the lease, and 0, or the place of a registered window's turn."""
ITEM = struct.Struct("<IIQQ")
"""The object's position in the lease, 0, first byte within the object, bytes."""
HEAD = struct.Struct("<IIQ")
"""Position, status, bytes that follow."""
TAIL = struct.Struct("<II")
"""Position, status."""
WINDOW = struct.Struct("<4sIQQII")
"""Of a windowed link, from the exporter, after the greeting: magic, turns, where the reader's section of the window
begins, bytes of a turn, bytes of the library's description that follow, 0."""
WINDOW_MAGIC = b"LFPW"
STAMP = struct.Struct("<16sQ40x")
"""Incarnation of the exporter; how many requests it had answered on this connection."""
MAX_DESCRIBED_BYTES = 1 << 16
MAX_WINDOW_BYTES = 1 << 30
MAX_LINK_ITEMS = 65_536
"""Items of one request."""

LINK_REST_S = 1.0
"""After a failure nothing is read over a link for so long: its jobs fail at once, and hold up no other peer's."""

READ, GONE, NOT_YET, OUTSIDE = 0, 1, 2, 3
"""Status of an item: its bytes follow (or have); the lease or the object's place has ended; these layers are not stored
yet; the object has no such bytes."""

STATUS_WORDS = {
    GONE: "its lease or its place at the peer has ended",
    NOT_YET: "these layers are not stored at the peer yet",
    OUTSIDE: "the peer's object has another size",
}


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Where the objects of a job lie: what the server tells its importer with a :class:`.host_messages.Fetch`.

    :param peer: its name, for people.
    :param link: ``tcp``, ``mooncake`` or ``nixl``.
    :param address: ``host:port`` of the exporter. :param incarnation: its own.
    :param token: of the lease.
    """

    peer: str
    link: str
    address: str
    incarnation: bytes
    token: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Origin)


def encode_origin(origin: Origin) -> bytes:
    """For the `origin` of a job."""
    return _encoder.encode(origin)


def decode_origin(raw: bytes) -> Origin:
    """:raises ProtocolError: it is none."""
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"objects of a peer without an origin: {error}") from None


def hello(incarnation: bytes) -> bytes:
    """The first frame, either way."""
    return HELLO.pack(LINK_MAGIC, LINK_VERSION, 0, incarnation)


def check_hello(raw: bytes) -> bytes:
    """The other end's incarnation.

    :raises ProtocolError: it speaks something else.
    """
    magic, version, _, incarnation = HELLO.unpack(raw)
    if magic != LINK_MAGIC or version != LINK_VERSION:
        raise ProtocolError(
            f"the other end of the link speaks {magic!r} version {version}, not {LINK_MAGIC!r} version {LINK_VERSION}; "
            "run the same layerflow version on both"
        )
    return bytes(incarnation)


def pack_window(start: int, turn_bytes: int, turns: int, described: int) -> bytes:
    """A reader's section of a window."""
    return WINDOW.pack(WINDOW_MAGIC, turns, start, turn_bytes, described, 0)


def unpack_window(raw: bytes) -> tuple[int, int, int, int]:
    """Where it begins, bytes of a turn, turns, bytes of the description that follows.

    :raises ProtocolError: it is none.
    """
    magic, turns, start, turn_bytes, described, _ = WINDOW.unpack(raw)
    if magic != WINDOW_MAGIC:
        raise ProtocolError(f"the exporter speaks of no window ({magic!r}): it serves another link")
    if not 0 < turns * turn_bytes <= MAX_WINDOW_BYTES or described > MAX_DESCRIBED_BYTES:
        raise ProtocolError(f"a window with {turns} turns of {turn_bytes} bytes, described in {described}")
    return start, turn_bytes, turns, described

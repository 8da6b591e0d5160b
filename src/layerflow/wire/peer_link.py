"""The link between an importer and an exporter: fixed frames over a byte stream, and where an object lies at a peer.

Both ends greet each other: the importer says HELLO with its reader's name and a nonce, the exporter answers with a
CHALLENGE, a nonce of its own and the proof that it knows that reader's key, and the importer says PROOF that it does
too. The key came with the owner's PeerWelcome and never crosses the link, nor does the exporter's incarnation.

Then the importer sends requests, each a REQUEST and `count` ITEMs, and is answered with a HEAD for each, then the bytes
of all whose status is :data:`READ`, one behind the other, then a TAIL for each of these. Only a TAIL says that bytes
are those of the object: the exporter still had the right to read them when it had, and the TAIL's tag, made with the
key of the lease, covers the bytes and which they are (:mod:`layerflow.hosts.peer.grants`). Integers are little-endian.

A windowed link (mooncake, nixl) is told of its window with a WINDOW after the greeting. Its requests name a turn of it,
which the exporter fills before it answers with the HEADs and TAILs; no bytes follow. A turn begins with a STAMP, which
the library brings along: it was this exporter's window, filled for this request.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

import msgspec

from layerflow.errors import ProtocolError

LINK_VERSION = 2
LINK_MAGIC, REQUEST_MAGIC = b"LFPL", b"LFPR"
READER_BYTES, NONCE_BYTES, PROOF_BYTES, LINK_KEY_BYTES = 16, 16, 32, 32
"""Of a reader's name on the link, of a nonce and of a proof in the greeting, and of the keys of readers and leases."""
PRINCIPAL_BYTES = 8
"""With which a reader's name begins: the same in the names of all readers of one principal, and in no others."""
HELLO = struct.Struct(f"<4sHH{READER_BYTES}s{NONCE_BYTES}s")
"""Magic, version, 0, the reader's name, the importer's nonce."""
CHALLENGE = struct.Struct(f"<4sHH{NONCE_BYTES}s{PROOF_BYTES}s")
"""Magic, version, 0, the exporter's nonce, its proof."""
PROOF = struct.Struct(f"<{PROOF_BYTES}s")
"""The importer's."""
REQUEST = struct.Struct("<4sI16sQ")
"""Magic, count of items, token of the lease, and 0, or the place of a registered window's turn."""
ITEM = struct.Struct("<IIQQ")
"""The object's position in the lease, 0, first byte within the object, bytes."""
HEAD = struct.Struct("<IIQ")
"""Position, status, bytes that follow."""
TAG_NONCE_BYTES, TAG_BYTES = 12, 28
"""Of a tag's nonce, and of a whole tag: the nonce and 16 bytes of AES-256-GMAC."""
TAIL = struct.Struct(f"<II{TAG_BYTES}s")
"""Position, status, tag; where the status is not READ, zeros."""
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

READ, GONE, NOT_YET, OUTSIDE, ALTERED = 0, 1, 2, 3, 4
"""Status of an item: its bytes follow (or have); the lease or the object's place has ended; these layers are not stored
yet; the object has no such bytes. ALTERED never crosses the link: the importer finds that a tag does not fit."""

STATUS_WORDS = {
    GONE: "its lease or its place at the peer has ended",
    NOT_YET: "these layers are not stored at the peer yet",
    OUTSIDE: "the peer's object has another size",
    ALTERED: "its bytes are not those that the peer has read: they were altered between the two arenas",
}


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Where the objects of a job lie: what the server tells its importer with a :class:`.host_messages.Fetch`.

    :param peer: its name, for people.
    :param link: ``tcp``, ``mooncake`` or ``nixl``.
    :param address: ``host:port`` of the exporter. :param incarnation: its own.
    :param reader: this server's name on that link. :param reader_key: shown to be known in the greeting.
    :param token: of the lease. :param lease_key: with which its ranges are tagged.
    """

    peer: str
    link: str
    address: str
    incarnation: bytes
    reader: bytes
    reader_key: bytes
    token: bytes
    lease_key: bytes


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


def check_version(magic: bytes, version: int) -> None:
    """:raises ProtocolError: the other end speaks something else."""
    if magic != LINK_MAGIC or version != LINK_VERSION:
        raise ProtocolError(
            f"the other end of the link speaks {magic!r} version {version}, not {LINK_MAGIC!r} version {LINK_VERSION}; "
            "run the same layerflow version on both"
        )


def reader_name_of(principal: str) -> bytes:
    """A name for a new reader of this principal, by which its exporter counts links; the principal it does not tell."""
    whose = hashlib.blake2b(principal.encode(), digest_size=PRINCIPAL_BYTES, person=b"layerflow-reader").digest()
    return whose + secrets.token_bytes(READER_BYTES - PRINCIPAL_BYTES)


def reader_key_of(exporter_key: bytes, reader: bytes) -> bytes:
    """The key that a reader shows to know: the server tells it, the exporter finds it by itself.

    :param exporter_key: of this exporter, known to its server.
    """
    return hashlib.blake2b(reader, key=exporter_key, digest_size=LINK_KEY_BYTES, person=b"layerflow-reader").digest()


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

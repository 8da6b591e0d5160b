"""What the pool stores: an object's layout in bytes, and its header.

An object is one chunk of one group of one shard, layer-major::

    header (64 B) | layer 0: plane 0 blocks, plane 1 blocks, ... | layer 1: ... | ...

so one layer of a chunk is one contiguous range, and within it each plane's blocks are contiguous.
"""

from __future__ import annotations

import struct

from layerflow.errors import PoolError
from layerflow.spec import GroupSpec

HEADER_BYTES = 64
MAGIC = b"LFOB"
LAYOUT_VERSION = 1
_HEADER = struct.Struct("<4sHHIIQ24sQQ")
assert _HEADER.size == HEADER_BYTES
_CHECKSUM = struct.Struct("<Q")
CHECKSUM_AT = 48
GENERATION_AT = 56
"""Where in the header the arena's server has a word of its own: another one each time that an object is published at
this place, 0 while none is there. Whoever reads an object without asking compares the word before and after.

It stays in the arena: headers are stored elsewhere without it (:func:`stored_header`). An object that came back to its
place with its old word would be taken for complete by whoever knows that word, before its layers have come."""

_START = struct.Struct(f"{CHECKSUM_AT}s")


def layer_bytes(group: GroupSpec, blocks: int) -> int:
    """Bytes of one layer of an object that holds `blocks` blocks."""
    return blocks * group.bytes_per_block


def object_bytes(group: GroupSpec, blocks: int) -> int:
    """Bytes of a whole object, header included."""
    return HEADER_BYTES + len(group.layers) * layer_bytes(group, blocks)


def plane_offsets(group: GroupSpec) -> tuple[int, ...]:
    """Where each plane starts within a layer, in bytes per block that the object holds."""
    offsets, at = [], 0
    for plane in group.planes:
        offsets.append(at)
        at += plane.token_bytes * group.entries
    return tuple(offsets)


def pack_header(key: bytes, *, blocks: int, tokens: int, payload: int, generation: int = 0) -> bytes:
    """The 64 header bytes of a complete object, without a checksum; see :func:`set_checksum`.

    :param key: the 24-byte object key.
    :param blocks: blocks in each layer.
    :param tokens: tokens that the chunk holds (a partial tail has fewer than `chunk_tokens`).
    :param payload: bytes after the header.
    :param generation: of the place in the arena; without meaning anywhere else.
    """
    return _HEADER.pack(MAGIC, LAYOUT_VERSION, 0, blocks, tokens, payload, key, 0, generation)


def header_start(memory: memoryview, offset: int) -> bytes:
    """A header without its checksum, to be compared with one of :func:`pack_header` in little time."""
    start: bytes = _START.unpack_from(memory, offset)[0]
    return start


def stored_header(memory: memoryview, offset: int) -> bytes:
    """Return the header at `offset` of the arena as it is stored anywhere else: the generation word is 0."""
    return bytes(memory[offset : offset + GENERATION_AT]) + bytes(HEADER_BYTES - GENERATION_AT)


def set_checksum(header: memoryview, checksum: int) -> None:
    """Enter the XXH3-64 of the payload into a header, before the object crosses a network."""
    _CHECKSUM.pack_into(header, CHECKSUM_AT, checksum)


def get_checksum(header: bytes | memoryview) -> int:
    """Read the payload's checksum; 0 = its writer kept none."""
    return int(_CHECKSUM.unpack_from(header, CHECKSUM_AT)[0])


def payload_bytes(memory: memoryview, offset: int) -> int:
    """Bytes after the header of the object at `offset`."""
    return int(_HEADER.unpack_from(memory, offset)[5])


def check_header(raw: bytes | memoryview, key: bytes, blocks: int) -> None:
    """Raise unless `raw` is the header of the complete object `key` with `blocks` blocks.

    :raises PoolError: naming what differs.
    """
    magic, version, _, stored_blocks, _, _, stored_key, _, _ = _HEADER.unpack(raw)
    if magic != MAGIC or version != LAYOUT_VERSION:
        raise PoolError(f"object {key.hex()}: no valid header at its place; it is treated as a miss")
    if stored_key != key or stored_blocks != blocks:
        raise PoolError(
            f"object {key.hex()} with {blocks} blocks: found {stored_key.hex()} with {stored_blocks} blocks at its "
            "place; it is treated as a miss"
        )

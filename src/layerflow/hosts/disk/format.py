"""How the disk tier stores an object: one file, whose name says what it is and whose end says what its bytes are.

A file is ``header (64 bytes) | layer 0 | layer 1 | ... | checksums``: the object as it lies in the arena, so that any
run of layers is one read straight into it. The checksums are ``u64[1 + layers]`` (XXH3 of the header, then of each
layer), little-endian, then the chunk's block digests (16 bytes each) where it has some, and one more checksum over the
file's name and these, so that no other object's file passes for it.

A name is ``KEY.LAYERSxLAYER_BYTES.BLOCKS.TOKENS[.PARENT][.bDIGESTS]``, keys in hex, DIGESTS the number of block
digests: listing a folder is reading its index, but for these digests.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import xxhash

from layerflow.hosts.backend import ObjectLocation
from layerflow.keys import DIGEST_BYTES
from layerflow.objects import HEADER_BYTES
from layerflow.pool.eviction import Evictable

FORMAT = "objects-1"
"""Name of the folder that holds files of this format, and of this layout of objects."""

BLOCK_BYTES = 4096  # what file systems hand out room in
_NAME = re.compile(
    r"([0-9a-f]{48})\.(\d{1,9})x(\d{1,15})\.(\d{1,10})\.(\d{1,10})(?:\.([0-9a-f]{48}))?(?:\.b(\d{1,5}))?"
)


class StoredFile(Evictable):
    """A complete object on disk. Pins and the eviction order belong to the index that it is in."""

    __slots__ = (
        "block_digests",
        "blocks",
        "digests",
        "doubtful",
        "layer_bytes",
        "layers",
        "name",
        "parent",
        "pins",
        "tokens",
    )

    def __init__(
        self, key: bytes, layers: int, layer_bytes: int, blocks: int, tokens: int, parent: bytes, digests: int = 0
    ) -> None:
        super().__init__(key, room_of(layers, layer_bytes, digests))
        self.digests = digests  #: block digests that the file has
        self.block_digests = b""  #: these, where they were read
        self.layers, self.layer_bytes = layers, layer_bytes
        self.blocks, self.tokens, self.parent = blocks, tokens, parent
        self.pins = 0  #: fetches that have it open
        self.doubtful = False  #: the system failed to read it: a new write of its key replaces it
        tail = f".{parent.hex()}" if parent else ""
        tail += f".b{digests}" if digests else ""
        self.name = f"{key.hex()}.{layers}x{layer_bytes}.{blocks}.{tokens}{tail}"

    @classmethod
    def of(cls, place: ObjectLocation) -> StoredFile:
        """What a writer's place becomes."""
        count = len(place.block_digests) // DIGEST_BYTES
        stored = cls(place.key, place.layers, place.layer_bytes, place.blocks, place.tokens, place.parent, count)
        stored.block_digests = place.block_digests
        return stored

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return file_bytes(self.layers, self.layer_bytes, self.digests)

    @property
    def end_bytes(self) -> int:
        """Of the file's end, behind the last layer."""
        return sums_bytes(self.layers) + self.digests * DIGEST_BYTES

    def fits(self, place: ObjectLocation) -> bool:
        """Whether a reader's place has this object's size."""
        return (self.layers, self.layer_bytes) == (place.layers, place.layer_bytes)


def parse_name(name: str) -> StoredFile | None:
    """None: not a name of this format."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, layers, layer_bytes, blocks, tokens, parent, digests = match.groups()
    sizes = (int(layers), int(layer_bytes), int(blocks), int(tokens))
    return StoredFile(bytes.fromhex(key), *sizes, bytes.fromhex(parent or ""), int(digests or 0))


def file_bytes(layers: int, layer_bytes: int, digests: int = 0) -> int:
    return HEADER_BYTES + layers * layer_bytes + sums_bytes(layers) + digests * DIGEST_BYTES


def room_of(layers: int, layer_bytes: int, digests: int = 0) -> int:
    """Bytes of the disk that such a file takes."""
    return -(-file_bytes(layers, layer_bytes, digests) // BLOCK_BYTES) * BLOCK_BYTES


def sums_bytes(layers: int) -> int:
    return 8 * (layers + 2)


def checksum(data: memoryview | bytes) -> int:
    """64 bits of XXH3. Without the GIL, at memory speed."""
    return xxhash.xxh3_64_intdigest(data)


def pack_sums(name: str, sums: Sequence[int], block_digests: bytes = b"") -> bytes:
    """A file's end. `sums`: the header's, then each layer's."""
    packed = struct.pack(f"<{len(sums)}Q", *sums) + block_digests
    return packed + struct.pack("<Q", checksum(name.encode() + packed))


def unpack_sums(name: str, raw: bytes, layers: int) -> tuple[tuple[int, ...], bytes] | None:
    """The checksums of the header and of each layer, and the block digests; None: not the end of this file."""
    packed, own, sums = raw[:-8], raw[-8:], 8 * (1 + layers)
    if len(packed) < sums or struct.pack("<Q", checksum(name.encode() + packed)) != own:
        return None
    return struct.unpack(f"<{1 + layers}Q", packed[:sums]), packed[sums:]

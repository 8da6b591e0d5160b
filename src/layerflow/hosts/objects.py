"""The objects of a host's jobs: where they lie in the arena, and which of them a backend with an index holds."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from layerflow.errors import ExtentError, ProtocolError
from layerflow.hosts.backend import BackendInfo, IndexEntry, ObjectLocation
from layerflow.keys import KEY_BYTES
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Evicted, Indexed, Objects, ToServer, Up, split_keys
from layerflow.wire.packing import list_u32, list_u64, pack_u32


def places_of(objects: Objects, arena: SharedMemory) -> list[ObjectLocation]:
    """The objects of a job, in its order.

    :raises ProtocolError: the arrays do not fit together.
    :raises ExtentError: an object would leave the arena.
    """
    keys = split_keys(objects.keys)
    try:
        offsets, sizes = list_u64(objects.offsets), list_u64(objects.layer_bytes)
        blocks, tokens = list_u32(objects.blocks), list_u32(objects.tokens)
        positions = list_u32(objects.positions) if objects.origin else [0] * len(keys)
    except ValueError as error:
        raise ProtocolError(f"the objects of a job do not fit together: {error}") from None
    if {len(offsets), len(sizes), len(blocks), len(tokens), len(positions)} != {len(keys)} or objects.layers < 1:
        raise ProtocolError(
            f"a job of {len(keys)} keys, {len(offsets)} offsets, {len(sizes)} sizes, {len(blocks)} block counts and "
            f"{len(tokens)} token counts over {objects.layers} layers"
        )
    parents, digests = dict(objects.parents), dict(objects.block_digests)
    if any(not 0 <= at < len(keys) or len(parent) != KEY_BYTES for at, parent in parents.items()):
        raise ProtocolError(f"a job of {len(keys)} keys with a parent at no position of it, or of the wrong size")
    base = arena.address
    places = [
        ObjectLocation(
            *(key, offset, base + offset, size, objects.layers, count, length, parents.get(at, b"")),
            *(digests.get(at, b""), objects.origin, position),
        )
        for at, (key, offset, size, count, length, position) in enumerate(
            zip(keys, offsets, sizes, blocks, tokens, positions, strict=True)
        )
    ]
    for place in places:
        if place.offset + place.nbytes > arena.nbytes or not place.blocks or not place.layer_bytes:
            raise ExtentError(
                f"object {place.key.hex()} of {place.blocks} blocks at bytes {place.offset} to "
                f"{place.offset + place.nbytes} of an arena of {arena.nbytes}"
            )
    return places


PIECE = 512
"""Entries of one message, some 2 ms of the server's loop: 16 KB, and 260 bytes more for each with block digests."""


class IndexReporter:
    """Says Up, and with an index everything that follows from it. The index itself is told once and not kept here.

    :param tell: sends to the server.
    """

    def __init__(self, tell: Callable[[ToServer], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._up = Up({})
        self._found_early: dict[bytes, IndexEntry] = {}
        self._gone_early: set[bytes] = set()
        self._attached = False

    def attach(self, attached: BackendInfo) -> None:
        """The backend is connected for the first time."""
        with self._lock:
            indexed = attached.index is not None
            self._up = Up(dict(attached.details), indexed, secrets.randbits(62) + 1 if indexed else 0)
            self._tell(self._up)
            if attached.index is not None:
                told = [
                    entry
                    for entry in attached.index
                    if entry.key not in self._gone_early and entry.key not in self._found_early
                ]
                self._say_held([*told, *self._found_early.values()])
            self._found_early, self._gone_early = {}, set()
            self._attached = True

    def again(self) -> None:
        """Tell that the backend can be used again after it could not."""
        with self._lock:
            self._tell(self._up)

    def found(self, entries: Sequence[IndexEntry]) -> None:
        """The backend holds these too. Any thread."""
        with self._lock:
            if not self._attached:
                self._found_early |= {entry.key: entry for entry in entries}
            elif self._up.indexed and entries:
                self._say_held(entries)

    def gone(self, keys: Sequence[bytes]) -> None:
        """Tell that these have left the backend. Any thread."""
        with self._lock:
            if not self._attached:
                self._gone_early |= set(keys)
                for key in keys:
                    self._found_early.pop(key, None)
            elif self._up.indexed:
                for at in range(0, len(keys), PIECE):
                    self._tell(Evicted(b"".join(keys[at : at + PIECE])))

    def _say_held(self, entries: Sequence[IndexEntry]) -> None:
        for at in range(0, max(1, len(entries)), PIECE):
            piece = entries[at : at + PIECE]
            self._tell(
                Indexed(
                    b"".join(entry.key for entry in piece),
                    pack_u32([entry.blocks for entry in piece]),
                    pack_u32([entry.tokens for entry in piece]),
                    tuple((position, entry.parent) for position, entry in enumerate(piece) if entry.parent),
                    at + PIECE >= len(entries),
                    tuple(
                        (position, entry.block_digests) for position, entry in enumerate(piece) if entry.block_digests
                    ),
                )
            )

"""Headers of objects in the arena, which only the pool writes: written, erased, and are they what it has written?"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import structlog

from layerflow.errors import PoolError
from layerflow.keys import describe_key
from layerflow.objects import CHECKSUM_AT, GENERATION_AT, HEADER_BYTES, check_header, header_start, pack_header
from layerflow.places import PLACE
from layerflow.pool.directory import DirectoryEntry

log = structlog.get_logger(__name__)

_NO_HEADER = bytes(HEADER_BYTES)
_LAST_GENERATION = (1 << 64) - 1
_WORDS = np.arange(CHECKSUM_AT // 8)
MANY = 48
"""So many headers are compared at once: of fewer, one by one is quicker."""


class Headers:
    """Those of one arena.

    :param view: its bytes.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._words = np.frombuffer(view[: len(view) // 8 * 8], np.int64)
        # Old payload must not look like a generation by chance: they begin anywhere.
        self._generation = secrets.randbits(63)
        self._dirty = 0  # bytes from the start that an object may ever have covered

    def write(self, entry: DirectoryEntry) -> None:
        """The header of an object that is complete."""
        offset, blocks, tokens, _ = entry.located
        generation = self._generation = self._generation % _LAST_GENERATION + 1
        header = pack_header(
            entry.key, blocks=blocks, tokens=tokens, payload=entry.nbytes - HEADER_BYTES, generation=generation
        )
        self._view[offset : offset + HEADER_BYTES] = header
        entry.header, entry.place = header[:CHECKSUM_AT], PLACE.pack(offset, generation)

    def erase(self, offset: int) -> None:
        """No stale header verifies."""
        self._view[offset : offset + HEADER_BYTES] = _NO_HEADER

    def erase_before(self, offset: int, room: int) -> None:
        """Where an object of `room` bytes will be written, none verifies before that."""
        if offset < self._dirty:
            self._view[offset : offset + HEADER_BYTES] = _NO_HEADER
        self._dirty = max(self._dirty, offset + room)

    def overwritten(self, entries: Sequence[DirectoryEntry]) -> list[bytes]:
        """Of these complete objects, the keys of those whose header is not theirs any more."""
        if len(entries) >= MANY and self._are_all(entries):
            return []
        view = self._view
        return [
            entry.key
            for entry in entries
            if header_start(view, entry.located.offset) != entry.header and not self._intact(entry)
        ]

    def are_current(self, places: bytes) -> bool:
        """Has each of these places (:data:`layerflow.places.PLACE`) the generation that it names?

        Workers who load by a plan compare this, too. It is less, and takes less, than what :meth:`overwritten` does.
        """
        wanted = np.frombuffer(places, np.int64).reshape(-1, PLACE.size // 8)
        return bool((self._words[wanted[:, 0] + GENERATION_AT >> 3] == wanted[:, 1]).all())

    def _are_all(self, entries: Sequence[DirectoryEntry]) -> bool:
        places = np.frombuffer(b"".join([entry.place for entry in entries]), np.int64).reshape(-1, PLACE.size // 8)
        wanted = np.frombuffer(b"".join([entry.header for entry in entries]), np.int64).reshape(-1, _WORDS.size)
        return bool((self._words[(places[:, :1] >> 3) + _WORDS] == wanted).all())

    def _intact(self, entry: DirectoryEntry) -> bool:
        offset, blocks, *_ = entry.located
        try:
            check_header(self._view[offset : offset + HEADER_BYTES], entry.key, blocks)
        except PoolError as error:
            log.error("object_overwritten", key=describe_key(entry.key), offset=offset, error=str(error))
            return False
        return True

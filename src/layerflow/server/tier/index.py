"""What the server knows of objects that lie in the tier and not in the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layerflow.hosts.backend import IndexEntry
from layerflow.pool.chunk_index import ChunkIndex

MAX_RECENT_CHUNKS = 16_384
"""Chunks of a pool that lists nothing, of which is remembered with which blocks they begin: some 700 bytes each."""


class TierIndex:
    """The content of a tier that nobody else can add to, kept in step with what its host reports.

    :param listener: hears the key of what is added or removed.
    """

    def __init__(self, listener: Callable[[bytes], None] | None = None) -> None:
        self._listener = listener
        self._entries: dict[bytes, IndexEntry] = {}
        self.chunks = ChunkIndex()  #: its partial chunks, and those that tell with which blocks they begin

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def add(self, entries: Iterable[IndexEntry]) -> None:
        """Add what is there."""
        for entry in entries:
            self.discard([entry.key])
            self._entries[entry.key] = entry
            self.chunks.add(entry.key, entry.tokens, entry.parent, entry.block_digests)
            if self._listener is not None:
                self._listener(entry.key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove what is not there (any more)."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.chunks.discard(key, entry.tokens, entry.parent, entry.block_digests)
                if self._listener is not None:
                    self._listener(key)

    def free(self, most: int) -> bool:
        """Let go of `most` entries of an index that is of no use any more; whether any is left."""
        for _ in range(min(most, len(self._entries))):
            key, entry = self._entries.popitem()
            self.chunks.discard(key, entry.tokens, entry.parent, entry.block_digests)
        return bool(self._entries)

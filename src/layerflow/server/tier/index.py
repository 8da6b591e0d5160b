"""What the server knows of objects that lie in the tier and not in the arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layerflow.hosts.backend import IndexEntry
from layerflow.pool.base import Child, Tail
from layerflow.pool.chunk_index import SharedBlocks, Tails

MAX_RECENT_CHUNKS = 16_384
"""Chunks of a pool that lists nothing, of which is remembered with which blocks they begin: some 700 bytes each."""


class TierIndex:
    """The content of a tier that nobody else can add to, kept in step with what its host reports.

    :ivar tails: its partial chunks.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, IndexEntry] = {}
        self.tails = Tails()
        self._shared = SharedBlocks()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def add(self, entries: Iterable[IndexEntry]) -> None:
        """These are there."""
        for entry in entries:
            self.discard([entry.key])
            self._entries[entry.key] = entry
            if entry.parent:
                self.tails.add(entry.parent, Tail(entry.tokens, entry.key), digested=bool(entry.block_digests))
            if entry.block_digests:
                self._shared.add(Child(entry.tokens, entry.key, entry.block_digests))

    def discard(self, keys: Iterable[bytes]) -> None:
        """These are not (any more)."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._unlink(key, entry)

    def free(self, most: int) -> bool:
        """Let go of `most` entries of an index that is of no use any more; whether any is left."""
        for _ in range(min(most, len(self._entries))):
            self._unlink(*self._entries.popitem())
        return bool(self._entries)

    def sharing(self, block: bytes) -> Iterator[Child]:
        """Chunks whose first block has this digest, newest first."""
        return self._shared.sharing(block)

    def _unlink(self, key: bytes, entry: IndexEntry) -> None:
        if entry.parent:
            self.tails.discard(entry.parent, Tail(entry.tokens, key), digested=bool(entry.block_digests))
        if entry.block_digests:
            self._shared.discard(key)

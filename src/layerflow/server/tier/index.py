"""What the server knows of objects that lie in the tier and not in the arena."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from layerflow.hosts.backend import IndexEntry
from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import Child, Tail

MAX_HIDDEN_KEYS = 65_536


class TierIndex:
    """The content of a tier that nobody else can add to, kept in step with what its host reports."""

    def __init__(self) -> None:
        self._entries: dict[bytes, IndexEntry] = {}
        self._tails: dict[bytes, dict[bytes, int]] = {}
        self._sharing: dict[bytes, dict[bytes, None]] = {}  # keys by the digest of the chunk's first block

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
                self._tails.setdefault(entry.parent, {})[entry.key] = entry.tokens
            if entry.block_digests:
                self._sharing.setdefault(entry.block_digests[:DIGEST_BYTES], {})[entry.key] = None

    def discard(self, keys: Iterable[bytes]) -> None:
        """These are not (any more)."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None and entry.parent:
                _leave(self._tails, entry.parent, key)
            if entry is not None and entry.block_digests:
                _leave(self._sharing, entry.block_digests[:DIGEST_BYTES], key)

    def clear(self) -> None:
        """Nothing is known."""
        self._entries.clear()
        self._tails.clear()
        self._sharing.clear()

    def tails(self, parent: bytes) -> list[Tail]:
        """Partial chunks that follow `parent`."""
        return [Tail(tokens, key) for key, tokens in self._tails.get(parent, {}).items()]

    def sharing(self, block: bytes) -> Iterator[Child]:
        """Chunks whose first block has this digest, newest first."""
        for key in reversed(self._sharing.get(block, {})):
            entry = self._entries[key]
            yield Child(entry.tokens, key, entry.block_digests)


def _leave(books: dict[bytes, dict[bytes, Any]], page: bytes, key: bytes) -> None:
    del books[page][key]
    if not books[page]:
        del books[page]


class NegativeCache:
    """Objects whose last read failed: not offered again for a while, so that a retry cannot loop. Bounded."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: bytes, until: float) -> None:
        """Not before `until`."""
        self._until.pop(key, None)
        self._until[key] = until
        if len(self._until) > MAX_HIDDEN_KEYS:
            self._until.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """It was written anew."""
        self._until.pop(key, None)

    def visible(self, keys: Sequence[bytes], now: float) -> list[bytes]:
        """Those of `keys` that may be offered."""
        if not self._until:
            return list(keys)
        return [key for key in keys if self._until.get(key, now) <= now]

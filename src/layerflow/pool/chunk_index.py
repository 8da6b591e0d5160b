"""Chunks by the one that they follow and by the blocks that they begin with, found without a look at their siblings."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, TypeVar

from layerflow.errors import PoolError
from layerflow.keys import DIGEST_BYTES, leading_blocks
from layerflow.pool.base import SharedChunk, StoredTail

ANY_LENGTH = 1 << 32
"""More tokens than any chunk has."""

MOST_NEAR = 32
"""Of chunks that share as many blocks with a prompt as each other, so many on each side of it are offered."""

_AFTER = b"\xff" * (DIGEST_BYTES + 1)  # sorts behind every digest

_Sibling = tuple[bytes, int, bytes, int]  # block digests, a serial number, key, tokens


class ChunkIndex:
    """Chunks of one pool, tier or hand-off that a prompt may share a beginning with: partial ones, and digested ones.

    All short prompts of a model follow its root, and all that begin with one system prompt have a first block in
    common, so a chunk may have any number of siblings. Those with the same first block are sorted by their block
    digests, each of which stands for all blocks before it: chunks that share most with a prompt stand next to it.

    :param most: the oldest of the digested are forgotten beyond so many; 0 = none is.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        # Per parent by length, and by whether block digests say how the chunk begins; the newest last.
        self._tails: dict[bytes, dict[tuple[int, bool], dict[bytes, None]]] = {}
        self._by_block: dict[bytes, list[_Sibling]] = {}
        self._digested: OrderedDict[bytes, _Sibling] = OrderedDict()
        self._serial = 0

    def add(self, key: bytes, tokens: int, parent: bytes = b"", block_digests: bytes = b"") -> None:
        """One more, the newest.

        :param parent: of a partial chunk.
        :param block_digests: empty = it is not known how the chunk begins.
        """
        if parent:
            lengths = self._tails.setdefault(parent, {})
            lengths.setdefault((tokens, bool(block_digests)), {})[key] = None
        if block_digests:
            self._forget(key)
            self._serial += 1
            sibling = self._digested[key] = block_digests, self._serial, key, tokens
            insort(self._by_block.setdefault(block_digests[:DIGEST_BYTES], []), sibling)
            if self._most and len(self._digested) > self._most:
                self._forget(next(iter(self._digested)))

    def discard(self, key: bytes, tokens: int, parent: bytes = b"", block_digests: bytes = b"") -> None:
        """Remove one; parameters as it was added with."""
        if parent:
            lengths = self._tails[parent]
            siblings = lengths[tokens, bool(block_digests)]
            del siblings[key]
            if not siblings:
                del lengths[tokens, bool(block_digests)]
                if not lengths:
                    del self._tails[parent]
        if block_digests:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        sibling = self._digested.pop(key, None)
        if sibling is not None:
            block = sibling[0][:DIGEST_BYTES]
            siblings = self._by_block[block]
            del siblings[bisect_left(siblings, sibling)]
            if not siblings:
                del self._by_block[block]

    def tails(self, parent: bytes, most: int = ANY_LENGTH, *, undigested: bool = False) -> Iterator[StoredTail]:
        """Partial chunks that follow `parent`, longest first, the newest first of equals. Nothing changes meanwhile.

        :param most: tokens that each has at most.
        :param undigested: only those whose block digests are not known; :meth:`sharing` finds the others.
        """
        lengths = self._tails.get(parent)
        if lengths is None:
            return
        for tokens, digested in sorted(lengths, reverse=True):
            if tokens <= most and not (undigested and digested):
                for key in reversed(lengths[tokens, digested]):
                    yield StoredTail(tokens, key)

    def sharing(self, prompt_blocks: bytes) -> Iterator[SharedChunk]:
        """Chunks that share leading blocks with a prompt, those that share most first. Nothing changes meanwhile.

        Of those that share as many: first the ones that end there, then a few of the others; the newest first of each.

        :param prompt_blocks: the prompt's block digests.
        """
        siblings = self._by_block.get(prompt_blocks[:DIGEST_BYTES])
        if siblings is None:
            return
        low = high = bisect_left(siblings, (prompt_blocks,))  # between these all are told
        while low or high < len(siblings):
            near = siblings[max(0, low - 1) : low] + siblings[high : high + 1]
            shared = max(leading_blocks(prompt_blocks, digests) for digests, *_ in near)
            same = prompt_blocks[: shared * DIGEST_BYTES]
            first = bisect_left(siblings, (same,), 0, low)
            end = bisect_left(siblings, (same + _AFTER,), high)
            longer = bisect_left(siblings, (same, math.inf), first, end)
            for _, _, key, tokens in reversed(siblings[first:longer]):
                yield SharedChunk(shared, tokens, key, shared)
            high = max(high, longer)
            others = siblings[max(longer, low - MOST_NEAR) : low] + siblings[high : min(end, high + MOST_NEAR)]
            for digests, _, key, tokens in sorted(others, key=_serial, reverse=True):
                yield SharedChunk(shared, tokens, key, len(digests) // DIGEST_BYTES)
            low, high = first, end

    def begins(self, block: bytes) -> bool:
        """Return whether a chunk's first block has this digest."""
        return block in self._by_block

    def tail_keys(self) -> Iterator[bytes]:
        """Every partial chunk."""
        return chain.from_iterable(chain.from_iterable(lengths.values()) for lengths in self._tails.values())

    def first_blocks(self) -> dict[bytes, bytes]:
        """Every chunk whose block digests are known, and the digest of its first block."""
        return {key: digests[:DIGEST_BYTES] for key, (digests, *_) in self._digested.items()}

    def validate(self) -> None:
        """:raises PoolError: chunks with the same first block are not sorted, or are not those that are known."""
        for block, siblings in self._by_block.items():
            if any(one >= other for one, other in pairwise(siblings)):
                raise PoolError("chunks with the same first block are not sorted by their block digests")
            if not siblings or any(sibling[0][:DIGEST_BYTES] != block for sibling in siblings):
                raise PoolError("a chunk is listed under a block that it does not begin with")
        if sorted(chain.from_iterable(self._by_block.values())) != sorted(self._digested.values()):
            raise PoolError("the chunks by first block differ from those whose block digests are known")


def _serial(sibling: _Sibling) -> int:
    return sibling[1]


NO_CHUNKS = ChunkIndex()
"""Nothing is added to it."""


# Of several places, as one.

_Found = TypeVar("_Found", StoredTail, SharedChunk)


def renamed(found: Iterable[StoredTail], parent: bytes) -> Iterator[StoredTail]:
    """Tails of another partition's objects, by the names that they have in `parent`'s."""
    end = parent[DIGEST_BYTES:]
    return (StoredTail(tail.tokens, tail.key[:DIGEST_BYTES] + end) for tail in found)


def merged_tails(*found: Iterable[StoredTail]) -> Iterator[StoredTail]:
    """Tails of several places, each longest first, as one; each once."""
    return _merged(found, lambda tail: -tail.tokens)


def merged_sharing(*found: Iterable[SharedChunk]) -> Iterator[SharedChunk]:
    """Chunks of several places, in the order of :meth:`ChunkIndex.sharing`, as one; each once."""
    return _merged(found, lambda chunk: (-chunk.shared, chunk.shared < chunk.blocks))


def _merged(found: Iterable[Iterable[_Found]], order: Callable[[_Found], Any]) -> Iterator[_Found]:
    seen: set[_Found] = set()
    for each in heapq.merge(*found, key=order):
        if each not in seen:
            seen.add(each)
            yield each

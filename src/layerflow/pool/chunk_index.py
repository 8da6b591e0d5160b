"""Chunks by the one they follow and by their first block: found without a look at all the others."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import Child, Tail

ANY_LENGTH = 1 << 32
"""More tokens than any chunk has."""


class Tails:
    """Partial chunks that follow a chunk, or a model's root, of one pool or tier.

    All short prompts of a model follow its root, and all that begin with one system prompt its last chunk, so there may
    be any number of them.
    """

    def __init__(self) -> None:
        # Per parent by length, and by whether block digests say how the chunk begins; the newest last.
        self._after: dict[bytes, dict[tuple[int, bool], dict[bytes, None]]] = {}

    def add(self, parent: bytes, tail: Tail, *, digested: bool) -> None:
        """One more, the newest.

        :param digested: its block digests are known, so that a prompt's own find it.
        """
        self._after.setdefault(parent, {}).setdefault((tail.tokens, digested), {})[tail.key] = None

    def discard(self, parent: bytes, tail: Tail, *, digested: bool) -> None:
        """It is gone; parameters as it was added with."""
        lengths = self._after[parent]
        siblings = lengths[tail.tokens, digested]
        del siblings[tail.key]
        if not siblings:
            del lengths[tail.tokens, digested]
            if not lengths:
                del self._after[parent]

    def after(self, parent: bytes, most: int = ANY_LENGTH, *, undigested: bool = False) -> Iterator[Tail]:
        """Those of at most `most` tokens, longest first, and the newest first among equals; nothing changes meanwhile.

        :param undigested: only those whose block digests are not known.
        """
        lengths = self._after.get(parent)
        if lengths is None:
            return
        for tokens, digested in sorted(lengths, reverse=True):
            if tokens <= most and not (undigested and digested):
                for key in reversed(lengths[tokens, digested]):
                    yield Tail(tokens, key)

    def keys(self) -> Iterator[bytes]:
        """All of them."""
        return chain.from_iterable(chain.from_iterable(lengths.values()) for lengths in self._after.values())


def renamed(found: Iterable[Tail], parent: bytes) -> Iterator[Tail]:
    """Tails of another partition's objects, by the names that they have in `parent`'s."""
    end = parent[DIGEST_BYTES:]
    return (Tail(tail.tokens, tail.key[:DIGEST_BYTES] + end) for tail in found)


def merged(*found: Iterable[Tail]) -> Iterator[Tail]:
    """Tails of several places, each longest first, as one; each once."""
    seen: set[Tail] = set()
    for tail in heapq.merge(*found, key=lambda tail: -tail.tokens):
        if tail not in seen:
            seen.add(tail)
            yield tail


# Chunks by the digest of their first block: those that a prompt may share leading blocks with.


class SharedBlocks:
    """A set of chunks, each of which has block digests.

    :param most: the oldest are forgotten beyond so many; 0 = none is.

    :ivar by_block: keys of the chunks by the digest of their first block, the newest last.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._children: OrderedDict[bytes, Child] = OrderedDict()
        self.by_block: dict[bytes, dict[bytes, None]] = {}

    def add(self, child: Child) -> bool:
        """One more, the newest; whether it is the only one with its first block."""
        self.discard(child.key)
        self._children[child.key] = child
        siblings = self.by_block.setdefault(child.block_digests[:DIGEST_BYTES], {})
        siblings[child.key] = None
        if self._most and len(self._children) > self._most:
            self.discard(next(iter(self._children)))
        return len(siblings) == 1

    def discard(self, key: bytes) -> bool:
        """It is gone, if it was there; whether it was the last one with its first block."""
        child = self._children.pop(key, None)
        if child is None:
            return False
        block = child.block_digests[:DIGEST_BYTES]
        del self.by_block[block][key]
        if self.by_block[block]:
            return False
        del self.by_block[block]
        return True

    def sharing(self, block: bytes) -> Iterator[Child]:
        """Chunks whose first block has this digest, newest first."""
        return (self._children[key] for key in reversed(self.by_block.get(block, {})))

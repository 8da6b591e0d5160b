"""Chunks by the digest of their first block: those that a prompt may share leading blocks with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import Child


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

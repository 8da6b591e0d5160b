"""The objects of a step's loads, whose places in the arena its hits have brought: are they still there?"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from layerflow.agent.descriptors import Numbered
from layerflow.objects import GENERATION_AT
from layerflow.ops.base import MappedArena, acquire
from layerflow.ops.paged import Int64
from layerflow.wire.messages import LostBlocks

REPLACED = "replaced: another object has taken its place in the arena"


class Residents:
    """Any thread may ask.

    :param arena: that holds them, as it is mapped here.
    :param places: uint64, shape ``(n, 2)``: offset and generation of each.

    :ivar words: int64, shape ``(n,)`` each: offsets of the words that say that an object is still there, and what they
        must say.
    """

    def __init__(self, arena: MappedArena, places: np.ndarray) -> None:
        offsets, generations = np.ascontiguousarray(places.T).view(np.int64)
        self.words = offsets + GENERATION_AT, generations
        self._memory = arena.array.view(np.int64)
        self._indices = self.words[0] >> 3
        self._offsets = offsets
        self._numbered: Mapping[int, Numbered] = {}
        self._known = np.zeros(len(offsets), dtype=bool)
        self._lost: list[LostBlocks] = []
        self._lock = threading.Lock()

    @property
    def there(self) -> bool:
        """Are all of them?"""
        return bool((self._memory[self._indices] == self.words[1]).all())

    def number(self, numbered: Mapping[int, Numbered]) -> None:
        """Their blocks."""
        self._numbered = numbered

    def replaced(self) -> list[tuple[int, int, int]]:
        """Blocks of those that are not any more, since the last call: group, first block, and the one behind the last.

        What was read before the call of objects that are not told was theirs.
        """
        acquire()
        if self.there:
            return []
        with self._lock:
            gone = (self._memory[self._indices] != self.words[1]) & ~self._known
            self._known |= gone
            found = [
                (group, lo, hi)
                for group, column in self._numbered.items()
                for lo, hi in _ranges(np.isin(column.object_offsets, self._offsets[gone]))
            ]
            self._lost += [LostBlocks(*where, REPLACED) for where in found]
            return found

    def lost(self) -> list[LostBlocks]:
        """All that was told so far."""
        with self._lock:
            return list(self._lost)


def _ranges(chosen: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    columns: Int64 = edges.reshape(-1, 2)
    return [(int(lo), int(hi)) for lo, hi in columns]

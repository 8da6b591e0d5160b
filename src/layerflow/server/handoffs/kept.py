"""How much of the arena hand-offs keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from layerflow.pool.base import NewObject


class KeptObjects:
    """Objects of hand-offs, each counted once however many keep it.

    :ivar nbytes: of all.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._keepers: Counter[bytes] = Counter()

    def add(self, objects: Mapping[bytes, NewObject]) -> None:
        """One more keeps these."""
        self.nbytes = self.nbytes_with(objects)
        self._keepers.update(objects.keys())

    def discard(self, objects: Mapping[bytes, NewObject]) -> None:
        """One keeps these no more."""
        for key, new in objects.items():
            self._keepers[key] -= 1
            if not self._keepers[key]:
                del self._keepers[key]
                self.nbytes -= new.nbytes

    def nbytes_with(self, objects: Mapping[bytes, NewObject]) -> int:
        """Of all, were these kept, too."""
        return self.nbytes + sum(new.nbytes for key, new in objects.items() if key not in self._keepers)

"""Objects that the worker whose turn it was did not store."""

from __future__ import annotations

from collections.abc import Iterable

MOST_MISSED = 16_384
"""Objects that are remembered; of more, the oldest are their worker's turn again."""


class MissedTurns:
    """Where equal workers take turns, whoever computes such an object next may store it.

    A worker whose saves are shed again and again would leave its share of every prompt unstored otherwise, and a hit
    ends at the first object that is missing.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Saves of these were given up."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > MOST_MISSED:
            del self._keys[next(iter(self._keys))]

    def drop(self, keys: Iterable[bytes]) -> None:
        """These are stored."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)

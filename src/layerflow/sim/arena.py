"""Room without bytes: what the pool needs of an arena, where nothing is ever read or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from layerflow.places import PLACE
from layerflow.pool.directory import DirectoryEntry


@dataclass(frozen=True, slots=True)
class SimulatedArena:
    """An arena of `nbytes` bytes, warm from the start."""

    nbytes: int

    @property
    def warm_bytes(self) -> int:
        """All of it."""
        return self.nbytes

    @property
    def view(self) -> memoryview:
        """No bytes."""
        return memoryview(b"")


class SimulatedHeaders:
    """Headers that nobody can overwrite."""

    def __init__(self) -> None:
        self._generations = count(1)

    def write(self, entry: DirectoryEntry) -> None:
        """The object is complete."""
        entry.place = PLACE.pack(entry.located.offset, next(self._generations))

    def erase(self, offset: int) -> None:
        """Nothing is there."""

    def erase_before(self, offset: int, room: int) -> None:
        """Nothing is there."""

    def overwritten(self, entries: Sequence[DirectoryEntry]) -> list[bytes]:
        """None ever is."""
        return []

    def are_current(self, places: bytes) -> bool:
        """All are."""
        return True

"""What lies where in the arena, by offset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

ThingT = TypeVar("ThingT")

_PARTS = 64


class ByOffset(Generic[ThingT]):
    """A dictionary for each part of the arena: one of all would stop the loop when it is full and made anew.

    :param nbytes: of the arena; every offset is below.
    """

    def __init__(self, nbytes: int) -> None:
        self._part = nbytes // _PARTS + 1
        self._parts: list[dict[int, ThingT]] = [{} for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, offset: int) -> ThingT:
        return self._parts[offset // self._part][offset]

    def __setitem__(self, offset: int, thing: ThingT) -> None:
        self._parts[offset // self._part][offset] = thing

    def pop(self, offset: int) -> ThingT | None:
        """What was there, which is there no more; None: nothing."""
        index = offset // self._part
        return self._parts[index].pop(offset, None) if 0 <= index < _PARTS else None

    def items(self) -> Iterator[tuple[int, ThingT]]:
        """Offsets and what is there; ascending by part only."""
        return chain.from_iterable(part.items() for part in self._parts)

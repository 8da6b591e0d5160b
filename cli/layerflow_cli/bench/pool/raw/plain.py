"""What all raw calls have in common, and those of memory: one contiguous copy."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from layerflow.system.memfd import SharedMemory


class Shape(NamedTuple):
    """What one round moves: so many objects of so many layers of so many bytes."""

    objects: int
    layers: int
    layer_bytes: int

    @property
    def nbytes(self) -> int:
        """Of all objects, without headers."""
        return self.objects * self.layers * self.layer_bytes


class Raw(abc.ABC):
    """One kind's calls, from and to memory of its own that is warm and shared, as an arena is."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.memory = SharedMemory.create(shape.nbytes, name="layerflow-bench")
        self.memory.populate()
        self.memory.array[:] = 1

    def place(self, index: int, layer: int) -> int:
        """Where a layer of an object lies in this process."""
        return self.memory.address + self.offset(index, layer)

    def offset(self, index: int, layer: int) -> int:
        """Where a layer of an object lies in the memory."""
        return (index * self.shape.layers + layer) * self.shape.layer_bytes

    @abc.abstractmethod
    def save(self, names: list[str]) -> None:
        """Write new objects, a layer of all of them at a time."""

    @abc.abstractmethod
    def load(self, names: list[str]) -> None:
        """Read them back, a layer of all of them at a time."""

    def forget(self, names: list[str]) -> None:  # noqa: B027 - most need not
        """Remove them, as far as that is needed."""

    def close(self) -> None:  # noqa: B027
        """Disconnect."""


def check_codes(explain: Callable[[int], str], codes: list[int], what: str) -> None:
    """:raises RuntimeError: one of a store's codes is not 0; `explain` says what it means."""
    wrong = [code for code in codes if code]
    if wrong:
        raise RuntimeError(f"cannot {what} {len(wrong)} of {len(codes)}: {explain(wrong[0])}")


class RawMemory(Raw):
    """A contiguous copy of all objects at once, on one thread."""

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._mine = np.ones(shape.nbytes, np.uint8)

    def save(self, names: list[str]) -> None:
        np.copyto(self.memory.array[: self._mine.nbytes], self._mine)

    def load(self, names: list[str]) -> None:
        np.copyto(self._mine, self.memory.array[: self._mine.nbytes])

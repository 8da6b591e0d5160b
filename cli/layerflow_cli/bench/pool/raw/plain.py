"""Raw calls of the kinds that need no library: one contiguous copy, and plain files."""

from __future__ import annotations

import abc
import os
from typing import Any, NamedTuple

import numpy as np

from layerflow.hosts.disk.format import file_bytes
from layerflow.memfd import SharedMemory
from layerflow.objects import HEADER_BYTES


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


class RawMemory(Raw):
    """A contiguous copy of all objects at once, on one thread."""

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._mine = np.ones(shape.nbytes, np.uint8)

    def save(self, names: list[str]) -> None:
        np.copyto(self.memory.array[: self._mine.nbytes], self._mine)

    def load(self, names: list[str]) -> None:
        np.copyto(self._mine, self.memory.array[: self._mine.nbytes])


class RawDisk(Raw):
    """Files of the tier's size, written under another name and renamed; a call moves a layer of one object.

    Without checksums: those are the tier's own.
    """

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._folder = options["path"]
        self._end = bytes(file_bytes(shape.layers, shape.layer_bytes) - HEADER_BYTES - shape.layers * shape.layer_bytes)
        os.makedirs(self._folder, exist_ok=True)

    def save(self, names: list[str]) -> None:
        paths = [f"{self._folder}/{name}" for name in names]
        files = [os.open(path + "~", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600) for path in paths]
        for layer in range(self.shape.layers):
            for index, fd in enumerate(files):
                _all(os.pwrite(fd, self._piece(index, layer), self._at(layer)), self.shape.layer_bytes)
        for fd, path in zip(files, paths, strict=True):
            os.pwrite(fd, bytes(HEADER_BYTES), 0)
            os.pwrite(fd, self._end, self._at(self.shape.layers))
            os.close(fd)
            os.rename(path + "~", path)

    def load(self, names: list[str]) -> None:
        files = [os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]
        for layer in range(self.shape.layers):
            for index, fd in enumerate(files):
                _all(os.preadv(fd, [self._piece(index, layer)], self._at(layer)), self.shape.layer_bytes)
        for fd in files:
            os.close(fd)

    def _piece(self, index: int, layer: int) -> memoryview:
        start = self.offset(index, layer)
        return self.memory.view[start : start + self.shape.layer_bytes]

    def _at(self, layer: int) -> int:
        return HEADER_BYTES + layer * self.shape.layer_bytes


def _all(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise OSError(f"{moved} of {wanted} bytes were moved; is the disk full?")

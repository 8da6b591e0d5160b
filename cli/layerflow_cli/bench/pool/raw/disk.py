"""Raw calls of a disk: plain files."""

from __future__ import annotations

import os
from typing import Any

from layerflow.hosts.disk.folder import file_bytes
from layerflow.objects import HEADER_BYTES
from layerflow_cli.bench.pool.raw.plain import Raw, Shape


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

"""A disk tier in a folder, for the tests of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.backend_contract import ARENA, Bench, Client

from layerflow.hosts.backend import BackendInfo
from layerflow.hosts.disk.backend import Disk
from layerflow.memfd import SharedMemory


def files(path: Path) -> list[str]:
    """Complete files."""
    return sorted(map(str, path.glob("objects-1/??/*")))


def torn(path: Path) -> list[str]:
    """Files being written, or left half written."""
    return sorted(map(str, path.glob("objects-1/new/*")))


class DiskBench(Bench):
    """:param gone: every key that was reported as gone since the last start."""

    def __init__(self, path: Path, capacity: int = 24 << 20, **options: Any) -> None:
        self.path = path
        self.options = {"path": str(path), "capacity": capacity, "timeout_ms": 2000} | options
        self.gone: list[bytes] = []
        arena = SharedMemory.create(ARENA)
        super().__init__(Client(Disk(self.options), arena.address), None, arena, capacity)
        self.attached = self.first.backend.attach(arena, self.gone.extend)

    def restart(self, **options: Any) -> BackendInfo:
        """As after a kill: the old one is not closed, only its lock goes with its process."""
        old = self.first.backend
        assert isinstance(old, Disk)
        assert old._folder is not None
        old._folder.close()
        self.gone.clear()
        self.options |= options
        self.first = Client(Disk(self.options), self.arena.address)
        self.attached = self.first.backend.attach(self.arena, self.gone.extend)
        return self.attached

    def close(self) -> None:
        self.first.backend.close()

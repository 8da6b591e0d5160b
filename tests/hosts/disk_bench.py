"""A disk tier in a folder, for the tests of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerflow.hosts.backend import BackendInfo, IndexEntry
from layerflow.hosts.disk.backend import Disk
from layerflow.system.memfd import SharedMemory
from layerflow_testing import ARENA, Bench, Client


def files(path: Path) -> list[str]:
    """Complete files."""
    return sorted(map(str, path.glob("objects-1/??/*")))


def torn(path: Path) -> list[str]:
    """Files being written, or left half written."""
    return sorted(map(str, path.glob("objects-1/new/*")))


class DiskBench(Bench):
    """:param gone: every key that was reported as gone since the last start.
    :param known: what the server would know: blocks and tokens by key.
    """

    def __init__(self, path: Path, capacity: int = 24 << 20, **options: Any) -> None:
        self.path = path
        self.options = {"path": str(path), "capacity": capacity, "timeout_ms": 2000} | options
        self.gone: list[bytes] = []
        self.known: dict[bytes, tuple[int, int]] = {}
        arena = SharedMemory.create(ARENA)
        super().__init__(Client(Disk(self.options), arena.address), None, arena, capacity)
        self.attached = self._attach()

    def restart(self, **options: Any) -> BackendInfo:
        """As after a kill: the old one is not closed, only its lock goes with its process."""
        old = self.first.backend
        assert isinstance(old, Disk)
        assert old._folder is not None
        old._folder.close()
        self.gone.clear()
        self.options |= options
        self.first = Client(Disk(self.options), self.arena.address)
        self.attached = self._attach()
        return self.attached

    def _attach(self) -> BackendInfo:
        backend = self.first.backend
        self.known.clear()
        lock = threading.Lock()
        gone_early: set[bytes] = set()

        def gone(keys: Sequence[bytes]) -> None:
            with lock:
                self.gone.extend(keys)
                gone_early.update(keys)
                for key in keys:
                    self.known.pop(key, None)

        def found(entries: Sequence[IndexEntry]) -> None:
            with lock:
                self.known.update((entry.key, (entry.blocks, entry.tokens)) for entry in entries)

        backend.report_found(found)
        attached = backend.attach(self.arena, gone)
        with lock:
            entries = [entry for entry in attached.index or () if entry.key not in gone_early]
            self.known.update((entry.key, (entry.blocks, entry.tokens)) for entry in entries)
        return attached

    def close(self) -> None:
        self.first.backend.close()

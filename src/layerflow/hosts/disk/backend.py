"""The disk tier: a folder of this machine behind the arena, which survives a restart.

Options: ``path``, ``capacity`` (bytes), ``timeout_ms``. Plain files, one per object (``format.py``), read
straight into the arena; why no library keeps them is in docs/backends.md.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from layerflow.hosts.backend import (
    Backend,
    BackendError,
    BackendInfo,
    IndexEntry,
    ObjectLocation,
    ObjectResult,
    Unreachable,
    Unusable,
)
from layerflow.hosts.disk.folder import Folder
from layerflow.hosts.disk.index import DiskIndex
from layerflow.hosts.disk.reads import DiskReads
from layerflow.hosts.disk.scan import Scan
from layerflow.hosts.disk.writes import DiskWrites
from layerflow.system.memfd import SharedMemory

log = structlog.get_logger(__name__)

DEFAULT_TIMEOUT_MS = 5000
SCAN_PATIENCE_S = 1.0
"""What a folder holds is offered from the start if it is read so soon, and later otherwise; new objects are written."""


class Disk(Backend):
    """:param options: see above."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._path = Path(os.path.abspath(options["path"]))
        self._capacity = int(options["capacity"])
        self._timeout_s = int(options.get("timeout_ms", DEFAULT_TIMEOUT_MS)) / 1e3
        if not options["path"] or self._capacity <= 0:
            raise Unusable("the disk tier needs pool.disk.path and a positive pool.disk.capacity")
        self._index = DiskIndex(self._capacity)
        self._folder: Folder | None = None
        self._scan: Scan | None = None
        self._reads: DiskReads | None = None
        self._writes: DiskWrites | None = None
        self._down = ""
        self._found: Callable[[Sequence[IndexEntry]], None] = lambda _: None

    def report_found(self, found: Callable[[Sequence[IndexEntry]], None]) -> None:
        self._found = found

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        self._index.tell(gone, self._found)
        self._take(create=True)
        self._reads = DiskReads(self._index, self._home, arena)
        self._writes = DiskWrites(self._index, self._home, arena)
        _allow_many_files()
        now = self._index.statistics()
        details: dict[str, str | int | float | bool] = {
            "path": str(self._path),
            "capacity_bytes": self._capacity,
            "objects": now.objects,
            "used_bytes": now.used_bytes,
        }
        return BackendInfo(details, self._index.entries())

    def check(self) -> None:
        try:
            if (self._scan is not None and self._scan.error) or not self._home().same():
                self._take(create=False)
        except Unreachable as error:
            self._down = str(error)
            raise
        except Unusable as error:  # the folder is a new one, and another server was quicker: it may leave again
            self._down = str(error)
            raise Unreachable(str(error)) from error
        self._down = ""

    def statistics(self) -> dict[str, float]:
        now, reads, writes = self._index.statistics(), self._reads, self._writes
        if reads is None or writes is None:
            return {}
        return {
            "objects": now.objects,
            "unread_folder": float(self._scan is not None and self._scan.running),
            "scanned_objects": self._scan.objects if self._scan is not None else 0,
            "used_bytes": now.used_bytes,
            "reserved_bytes": now.reserved_bytes,
            "capacity_bytes": self._capacity,
            "free_bytes": self._free_bytes(),
            "read_bytes": reads.read_bytes,
            "written_bytes": writes.written_bytes,
            "corrupt_objects": reads.corrupt,
            "evicted_objects": now.evictions,
            "evicted_bytes": now.evicted_bytes,
            "full_writes": writes.full,
            "write_errors": writes.errors,
            "read_errors": reads.errors,
        }

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if self._down:
            raise Unreachable(self._down)
        return self._index.lookup(keys)

    def hide(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self._index.lock:  # so that nobody publishes the key again in between
                stored = self._index.drop(key)
                if stored is not None:
                    self._home().remove(stored)

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Everything that is on this disk."""
        held = [entry.key for entry in self._index.entries()]
        for done, key in enumerate(held):
            if time.monotonic() >= until:
                raise BackendError(f"{done} of {len(held)} objects were removed in time; purge again for the rest")
            self.hide([key])
        return len(held)

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._reader().open(places, until)

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self._reader().read(places, lo, hi, until)

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        self._reader().close(places)

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._writer().open(places, until)

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self._writer().write(places, lo, hi, until)

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self._writer().commit(places, until)

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        self._writer().revoke(places)

    def close(self) -> None:
        if self._reads is not None:
            self._reads.close_all()
        if self._writes is not None:
            self._writes.close_all()
        if self._folder is not None:
            self._folder.close()

    def _take(self, *, create: bool) -> None:
        """Open the folder at this path, and have read what is in it now."""
        before = self._folder
        folder = Folder.open(self._path, time.monotonic() + self._timeout_s * create, create=create, before=before)
        if before is not None:
            before.close()
        try:
            folder.clear_torn()
        except OSError as error:
            folder.close()
            raise Unreachable(f"{self._path} cannot be read: {error.strerror}; see the system's log") from error
        self._folder, self._scan = folder, Scan(self._index, folder)
        if not self._scan.wait(SCAN_PATIENCE_S):
            log.info("disk_reading", path=str(self._path), objects=self._scan.objects)
        elif self._scan.error:
            raise Unreachable(f"{self._path} {self._scan.error}")

    def _home(self) -> Folder:
        assert self._folder is not None, "the disk tier is used before it is attached"
        return self._folder

    def _reader(self) -> DiskReads:
        assert self._reads is not None, "the disk tier is used before it is attached"
        return self._reads

    def _writer(self) -> DiskWrites:
        assert self._writes is not None, "the disk tier is used before it is attached"
        return self._writes

    def _free_bytes(self) -> float:
        try:
            return self._home().free_bytes()
        except OSError:
            return 0


def _allow_many_files() -> None:
    """Each object that is read or written is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

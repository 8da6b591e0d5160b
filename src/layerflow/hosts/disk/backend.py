"""The disk tier: a folder of this machine behind the arena, which survives a restart.

Options: ``path``, ``capacity`` (bytes), ``timeout_ms``. Plain files, one per object (``folder.py``), read
straight into the arena; why no library keeps them is in docs/backends.md.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from layerflow.hosts.backend import (
    OK,
    Backend,
    BackendError,
    BackendInfo,
    IndexEntry,
    ObjectLocation,
    ObjectResult,
    ObjectStatus,
    Unreachable,
    Unusable,
)
from layerflow.hosts.disk.folder import Folder, StoredFile, checksum, pack_sums, unpack_sums
from layerflow.hosts.disk.index import DiskIndex
from layerflow.keys import describe_key
from layerflow.objects import HEADER_BYTES, stored_header
from layerflow.system.descriptors import raise_limit
from layerflow.system.memfd import SharedMemory

# Objects on their way from the disk into the arena. Used by the fetch thread alone.


log = structlog.get_logger(__name__)

_LATE = ObjectResult(ObjectStatus.FAILED, "its time ran out")
_ABSENT = ObjectResult(ObjectStatus.MISSING, "not on disk in this size")
_GONE = ObjectResult(ObjectStatus.MISSING, "its file is gone")
_NOT_OPEN = ObjectResult(ObjectStatus.MISSING, "not opened, or closed already")


@dataclass(slots=True, eq=False)
class OpenFile:
    """An object that is open. :param sums: of the header, then of each layer."""

    stored: StoredFile
    fd: int
    sums: tuple[int, ...]


class DiskReads:
    """:param folder: the one to read from now."""

    def __init__(self, index: DiskIndex, folder: Callable[[], Folder], arena: SharedMemory) -> None:
        self._index, self._folder, self._view = index, folder, arena.view
        self._open: dict[tuple[bytes, int], OpenFile] = {}
        self.read_bytes = self.corrupt = self.errors = 0

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return [_LATE if time.monotonic() >= until else self._open_one(place) for place in places]

    def read(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        if not lo and len(places) > 1:
            self._announce(places, hi)
        return [_LATE if time.monotonic() >= until else self._read_one(place, lo, hi) for place in places]

    def close(self, places: Sequence[ObjectLocation]) -> None:
        for place in places:
            reading = self._open.pop((place.key, place.offset), None)
            if reading is not None:
                os.close(reading.fd)
                self._index.unpin(reading.stored)

    def close_all(self) -> None:
        for reading in self._open.values():
            os.close(reading.fd)
            self._index.unpin(reading.stored)
        self._open.clear()

    def _open_one(self, place: ObjectLocation) -> ObjectResult:
        if (place.key, place.offset) in self._open:
            return OK
        stored = self._index.pin(place)
        if stored is None:
            return _ABSENT
        result = self._open_file(place, stored)
        if result is not OK:
            self._index.unpin(stored)
        return result

    def _open_file(self, place: ObjectLocation, stored: StoredFile) -> ObjectResult:
        fd, end = -1, stored.end_bytes
        try:
            fd = self._folder().open_whole(stored)
            said = unpack_sums(stored.name, os.pread(fd, end, stored.nbytes - end), stored.layers)
            if said is None:
                return self._broken(stored, "its checksums are not its own")
            self._open[place.key, place.offset] = OpenFile(stored, fd, said[0])
            fd = -1
            return OK
        except OSError as error:
            return self._refused(stored, error)
        finally:
            if fd >= 0:
                os.close(fd)

    def _announce(self, places: Sequence[ObjectLocation], hi: int) -> None:
        """Let the disk work on the first layers of all at once: they come 3 times as early. Later ones gain nothing:
        the system reads ahead of them by itself."""
        for place in places:
            reading = self._open.get((place.key, place.offset))
            if reading is not None:
                try:
                    os.posix_fadvise(reading.fd, 0, place.start(hi), os.POSIX_FADV_WILLNEED)
                except OSError as error:  # the read itself will say what is wrong
                    log.debug("disk_readahead_refused", error=error.strerror)

    def _read_one(self, place: ObjectLocation, lo: int, hi: int) -> ObjectResult:
        reading = self._open.get((place.key, place.offset))
        if reading is None or not reading.stored.fits(place):
            return _NOT_OPEN
        begin, end = (place.start(lo) if lo else 0), place.start(hi)
        into = self._view[place.offset + begin : place.offset + end]
        if len(into) != end - begin:
            return ObjectResult(ObjectStatus.FAILED, f"bytes {begin}:{end} from {place.offset} leave the arena")
        try:
            if not _read_into(reading.fd, into, begin):
                return self._broken(reading.stored, "its file is cut short")
        except OSError as error:
            return self._refused(reading.stored, error)
        sums, base = reading.sums, place.offset
        if not lo and checksum(self._view[base : base + HEADER_BYTES]) != sums[0]:
            return self._broken(reading.stored, "the checksum of its header differs")
        for layer in range(lo, hi):
            if checksum(self._view[base + place.start(layer) : base + place.start(layer + 1)]) != sums[1 + layer]:
                return self._broken(reading.stored, f"the checksum of layer {layer} differs")
        self.read_bytes += end - begin
        return OK

    def _broken(self, stored: StoredFile, reason: str) -> ObjectResult:
        self.corrupt += 1
        log.error("disk_object_corrupt", key=describe_key(stored.key), file=stored.name, reason=reason)
        self._forget(stored)
        return ObjectResult(ObjectStatus.BROKEN, reason)

    def _refused(self, stored: StoredFile, error: OSError) -> ObjectResult:
        """The system would not open or read it."""
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            self._forget(stored)
            return _GONE
        self.errors += 1
        self._index.doubt(stored)  # the error may pass: the file stays until another write of its key replaces it
        return ObjectResult(ObjectStatus.FAILED, f"cannot be read: {error.strerror}")

    def _forget(self, stored: StoredFile) -> None:
        with self._index.lock:  # so that nobody publishes the key again in between
            if self._index.drop(stored.key, only=stored) is not None:
                self._folder().remove(stored)


def _read_into(fd: int, into: memoryview, at: int) -> bool:
    """Whether the file had that many bytes."""
    while into:
        count = os.preadv(fd, [into], at)
        if not count:
            return False
        into, at = into[count:], at + count
    return True


# Objects on their way from the arena to the disk. Used by the write thread alone.


_NOT_OPEN_TO_WRITE = ObjectResult(ObjectStatus.FAILED, "not opened for writing, or given up")
_OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT)
_REASONS = {
    ObjectStatus.EXISTS: "complete, or being written",
    ObjectStatus.FULL: "all that is on disk is being read or written, or the file system is full of other files",
    ObjectStatus.TOO_LARGE: "larger than pool.disk.capacity",
}


@dataclass(slots=True, eq=False)
class Writing:
    """An object that is open. :param sums: of the layers written so far."""

    stored: StoredFile
    fd: int
    offset: int
    sums: list[int] = field(default_factory=list)


class DiskWrites:
    """:param folder: the one to write to now."""

    def __init__(self, index: DiskIndex, folder: Callable[[], Folder], arena: SharedMemory) -> None:
        self._index, self._folder, self._view = index, folder, arena.view
        self._open: dict[bytes, Writing] = {}
        self.written_bytes = self.full = self.errors = 0

    def open(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return [_LATE if time.monotonic() >= until else self._open_one(place) for place in places]

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return [_LATE if time.monotonic() >= until else self._write_one(place, lo, hi) for place in places]

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        results = []
        try:
            for place in places:
                if time.monotonic() >= until:  # a failed commit is the last call for its object
                    self.revoke([place])
                    results.append(_LATE)
                else:
                    results.append(self._commit_one(place))
        finally:
            self._index.tell_published()
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        for place in places:
            writing = self._of(place)
            if writing is not None:
                self._give_up(writing)

    def close_all(self) -> None:
        for writing in list(self._open.values()):
            self._give_up(writing)

    def _open_one(self, place: ObjectLocation) -> ObjectResult:
        stored, folder = StoredFile.of(place), self._folder()
        try:
            outcome, victims = self._index.reserve(stored, folder.free_bytes())
        except OSError as error:
            return self._refused(error)
        if outcome is not ObjectStatus.OK:
            self.full += outcome is ObjectStatus.FULL
            return ObjectResult(outcome, _REASONS[outcome])
        for victim in victims:
            folder.remove(victim)
        try:
            self._open[place.key] = Writing(stored, folder.create(stored), place.offset)
        except OSError as error:
            self._index.release(stored)
            return self._refused(error)
        return OK

    def _write_one(self, place: ObjectLocation, lo: int, hi: int) -> ObjectResult:
        writing = self._of(place)
        if writing is None:
            return _NOT_OPEN_TO_WRITE
        if len(writing.sums) != lo or not lo <= hi <= place.layers:
            self._give_up(writing)
            return ObjectResult(ObjectStatus.FAILED, f"layers {lo} to {hi} after {len(writing.sums)} of {place.layers}")
        layers = [
            self._view[place.offset + place.start(at) : place.offset + place.start(at + 1)] for at in range(lo, hi)
        ]
        if any(len(layer) != place.layer_bytes for layer in layers):
            self._give_up(writing)
            return ObjectResult(ObjectStatus.FAILED, f"layers {lo} to {hi} from {place.offset} leave the arena")
        begin, end = place.start(lo), place.start(hi)
        try:
            _write_from(writing.fd, self._view[place.offset + begin : place.offset + end], begin)
        except OSError as error:
            return self._failed(writing, error)
        writing.sums += map(checksum, layers)
        self.written_bytes += end - begin
        return OK

    def _commit_one(self, place: ObjectLocation) -> ObjectResult:
        writing = self._of(place)
        if writing is None:
            return _NOT_OPEN_TO_WRITE
        stored = writing.stored
        if len(writing.sums) != stored.layers:
            self._give_up(writing)
            return ObjectResult(ObjectStatus.FAILED, f"{len(writing.sums)} of {stored.layers} layers are written")
        header = stored_header(self._view, place.offset)
        try:
            _write_from(writing.fd, memoryview(header), 0)
            end = pack_sums(stored.name, [checksum(header), *writing.sums], stored.block_digests)
            _write_from(writing.fd, memoryview(end), stored.nbytes - len(end))
            fd, writing.fd = writing.fd, -1
            os.close(fd)  # some file systems say only now that a write failed
            with self._index.lock:  # so that nobody removes the new file in place of the one that had its name
                self._folder().publish(stored)
                replaced = self._index.publish(stored)
                if replaced is not None and replaced.name != stored.name:
                    self._folder().remove(replaced)
        except OSError as error:
            return self._failed(writing, error)
        del self._open[place.key]
        return OK

    def _of(self, place: ObjectLocation) -> Writing | None:
        """None also for the place of another writer of this key, who was told that it exists."""
        writing = self._open.get(place.key)
        return writing if writing is not None and writing.offset == place.offset else None

    def _give_up(self, writing: Writing) -> None:
        del self._open[writing.stored.key]
        if writing.fd >= 0:
            try:
                os.close(writing.fd)
            except OSError as error:  # it is thrown away
                log.warning("disk_close_failed", file=writing.stored.name, error=error.strerror)
        self._folder().remove(writing.stored, torn=True)
        self._index.release(writing.stored)

    def _failed(self, writing: Writing, error: OSError) -> ObjectResult:
        self._give_up(writing)
        if error.errno in _OUT_OF_ROOM:  # others fill the disk, or a quota: there is less room than capacity
            for victim in self._index.shrink(writing.stored.room):
                self._folder().remove(victim)
        return self._refused(error)

    def _refused(self, error: OSError) -> ObjectResult:
        reason = f"cannot be written: {error.strerror}"
        if error.errno in _OUT_OF_ROOM:
            self.full += 1
            return ObjectResult(ObjectStatus.FULL, reason)
        if error.errno == errno.EFBIG:
            return ObjectResult(ObjectStatus.TOO_LARGE, reason)
        self.errors += 1
        return ObjectResult(ObjectStatus.FAILED, reason)


def _write_from(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwritev(fd, [data], at)
        if not count:
            raise OSError(errno.EIO, "the file system takes no bytes, and gives no reason")
        data, at = data[count:], at + count


# Reading what a folder holds, on a thread of its own: on a cold disk each file's size is a seek, minutes for all.


BATCH = 4096
"""Objects that enter the index under one holding of its lock; as many as one message to the server names."""
REMOVE_BATCH = 64
DESCRIBED = 256
"""Objects whose block digests are told at once."""
UNREADABLE_LOGGED = 8
"""Files whose end cannot be read are named in the log up to this number, and counted beyond."""


class Scan:
    """One reading of one folder into the index, which is written to and evicted from meanwhile. Starts at once.

    Objects are offered when every file is known, because the oldest must enter the order of eviction first.
    """

    def __init__(self, index: DiskIndex, folder: Folder) -> None:
        self._index, self._folder = index, folder
        self._reading = index.clear()
        self._began = time.monotonic()
        self._listed, self._done = threading.Event(), threading.Event()
        self.objects = 0  #: found so far
        self.error = ""  #: why the folder cannot be read; empty = it can
        threading.Thread(target=self._run, name="layerflow-scan", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether objects are missing in the index because they were not found yet."""
        return not self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended in time."""
        return self._done.wait(timeout_s)

    def wait_listed(self, timeout_s: float) -> bool:
        """Whether in time all files that it finds are in the index, or it has ended; `error` says whether it could."""
        return self._listed.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._fill()
        except OSError as error:
            self.error = f"cannot be read: {error.strerror}; see the system's log"
            log.warning("disk_not_read", error=error.strerror)
        except _Superseded:
            log.info("disk_reading_stopped", reason="the folder was opened anew, or emptied")
        except Exception as error:  # what was found until then is not all there is
            self.error = f"cannot be read: {type(error).__name__}: {error}"
            log.exception("disk_not_read", error=self.error)
        finally:
            self._listed.set()
            self._done.set()

    def _fill(self) -> None:
        found = self._folder.scan(self._count)
        removed = 0
        for at in range(0, len(found), BATCH):
            with self._index.lock:  # a file of the same name may be published right after
                outdated = self._index.fill(self._reading, found[at : at + BATCH])
                for stored in outdated:
                    self._folder.remove(stored)
            removed += len(outdated)
        self._index.filled(self._reading)
        self._listed.set()
        while True:
            with self._index.lock:
                victims = self._index.shrink_to_capacity(REMOVE_BATCH)
                for stored in victims:
                    self._folder.remove(stored)
            if not victims:
                break
            removed += len(victims)
        now = self._index.statistics()
        log.info(
            "disk_opened",
            path=str(self._folder.path),
            objects=now.objects,
            bytes=now.used_bytes,
            removed=removed,
            took_s=round(time.monotonic() - self._began, 3),
        )
        self._describe([stored for stored in reversed(found) if stored.digests])

    def _describe(self, found: list[StoredFile]) -> None:
        """Block digests are in the files: a read of each that has some, the newest first. They are offered whole until
        then."""
        unreadable = 0
        for at in range(0, len(found), DESCRIBED):
            few = []
            for stored in found[at : at + DESCRIBED]:
                try:
                    few.append((stored, self._folder.block_digests(stored)))
                except OSError as error:  # it may pass, and the folder has other files
                    unreadable += 1
                    if unreadable <= UNREADABLE_LOGGED:
                        log.warning("disk_file_unreadable", file=stored.name, error=error.strerror)
                    self._index.doubt(stored)
            if not self._index.describe(self._reading, few):
                raise _Superseded
        if unreadable > UNREADABLE_LOGGED:
            log.warning("disk_files_unreadable", files=unreadable)

    def _count(self, objects: int, nbytes: int) -> None:
        self.objects += objects
        if not self._index.count(self._reading, nbytes):
            raise _Superseded


class _Superseded(Exception):
    """Nothing that was found is there: all was removed, or the folder is another one by now and has another scan."""


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
        raise_limit()  # each object that is read or written is an open file
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
        """Everything that is on this disk.

        While the folder is read, most of that is not known: whatever is found later would be offered.
        """
        scan = self._scan
        if scan is None or not scan.wait_listed(max(0.0, until - time.monotonic())):
            raise BackendError("the folder is still being read; purge again")
        if scan.error:
            raise Unreachable(f"{self._path} {scan.error}")
        held = [entry.key for entry in self._index.entries()]
        for done, key in enumerate(held):
            if time.monotonic() >= until:
                raise BackendError(f"{done} of {len(held)} objects were removed in time; purge again for the rest")
            self.hide([key])
        if self._scan is not scan:
            raise BackendError("the folder was opened anew meanwhile; purge again")
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
            if not folder.reopened:
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

"""Objects on their way from the arena to the disk. Used by the write thread alone."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.disk.folder import Folder
from layerflow.hosts.disk.format import StoredFile, checksum, pack_sums
from layerflow.hosts.disk.index import DiskIndex
from layerflow.objects import HEADER_BYTES
from layerflow.system.memfd import SharedMemory

log = structlog.get_logger(__name__)

_LATE = ObjectResult(ObjectStatus.FAILED, "its time ran out")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "not opened for writing, or given up")
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
        for place in places:
            if time.monotonic() >= until:  # a failed commit is the last call for its object
                self.revoke([place])
                results.append(_LATE)
            else:
                results.append(self._commit_one(place))
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
            return _NOT_OPEN
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
            return _NOT_OPEN
        stored = writing.stored
        if len(writing.sums) != stored.layers:
            self._give_up(writing)
            return ObjectResult(ObjectStatus.FAILED, f"{len(writing.sums)} of {stored.layers} layers are written")
        header = bytes(self._view[place.offset : place.offset + HEADER_BYTES])
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
        data, at = data[count:], at + count

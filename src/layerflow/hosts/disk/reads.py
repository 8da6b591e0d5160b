"""Objects on their way from the disk into the arena. Used by the fetch thread alone."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.disk.folder import Folder
from layerflow.hosts.disk.format import StoredFile, checksum, unpack_sums
from layerflow.hosts.disk.index import DiskIndex
from layerflow.keys import describe_key
from layerflow.objects import HEADER_BYTES
from layerflow.system.memfd import SharedMemory

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

"""Which objects are on disk, how much room they take, and which goes when room is needed.

Used from every thread of the host, under one lock that is never held during a transfer. Who hears of
a key that left (`gone`) hears it before the key can be published again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from layerflow.errors import PoolError
from layerflow.hosts.backend import IndexEntry, ObjectLocation, ObjectStatus
from layerflow.hosts.disk.folder import StoredFile
from layerflow.pool.eviction import AdaptiveClock


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    objects: int
    used_bytes: int
    reserved_bytes: int
    evictions: int
    evicted_bytes: int


@dataclass(slots=True, eq=False)
class FolderReading:
    """What is known while the folder is read.

    :param nbytes: of files that are found and not in the index yet.
    :param departed: names that have left the index meanwhile, which the reading may still find.
    :param written: objects that were published meanwhile.
    """

    nbytes: int = 0
    departed: set[str] = field(default_factory=set)
    written: list[StoredFile] = field(default_factory=list)


class DiskIndex:
    """:param capacity: most bytes of the disk that files may take, those being written included."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._gone: Callable[[Sequence[bytes]], None] = lambda _: None
        self._found: Callable[[Sequence[IndexEntry]], None] = lambda _: None
        self.lock = threading.RLock()
        self._held: dict[bytes, StoredFile] = {}
        self._reserved: dict[bytes, int] = {}
        self._reserved_bytes = 0
        self._policy: AdaptiveClock[StoredFile] = AdaptiveClock()
        self._used = self._pinned = 0
        self._reading: FolderReading | None = None  #: that goes on
        self._last_reading: FolderReading | None = None  #: that began last; its files are described when it is over
        self._evictions = self._evicted_bytes = 0
        self._published: list[IndexEntry] = []  # and not told yet

    def tell(self, gone: Callable[[Sequence[bytes]], None], found: Callable[[Sequence[IndexEntry]], None]) -> None:
        """Set whom to tell, under the lock, of keys that left and of objects that are there.

        What is published and leaves is told in that order.
        """
        self._gone, self._found = gone, found

    # The folder is read, while objects are written to it and removed from it ----------------------

    def clear(self) -> FolderReading:
        """Forget everything: the folder is read anew, and what an earlier reading finds is ignored."""
        with self.lock:
            lost = list(self._held)
            self._held, self._policy = {}, AdaptiveClock()
            self._used = self._pinned = 0
            self._reading = self._last_reading = FolderReading()
            if lost:
                self._tell_gone(lost)
            return self._reading

    def count(self, reading: FolderReading, nbytes: int) -> bool:
        """Files were found that take so much of the disk. False: another reading has begun."""
        with self.lock:
            reading.nbytes += nbytes
            return reading is self._reading

    def fill(self, reading: FolderReading, found: Iterable[StoredFile]) -> list[StoredFile]:
        """What the folder holds, oldest first.

        :returns: what must be removed because a newer file has its key. More may be held than capacity now.
        """
        new: list[StoredFile] = []
        outdated: list[StoredFile] = []
        with self.lock:
            if reading is not self._reading:
                return []
            for stored in found:
                reading.nbytes -= stored.room
                held = self._held.get(stored.key)
                if held is not None:
                    outdated += [stored] if stored.name != held.name else []
                elif stored.name not in reading.departed:
                    self._admit(stored)
                    new.append(stored)
            self._found([entry_of(stored) for stored in new])
        return outdated

    def filled(self, reading: FolderReading) -> None:
        """That was all: what was written meanwhile is younger."""
        with self.lock:
            if reading is not self._reading:
                return
            self._reading = None
            for stored in reading.written:
                if self._held.get(stored.key) is stored and not stored.pins:
                    self._policy.park((stored,))
                    self._policy.unpark((stored,))

    def describe(self, reading: FolderReading, described: Iterable[tuple[StoredFile, bytes]]) -> bool:
        """Block digests were read of files that a reading found. False: another reading has begun since."""
        with self.lock:
            if reading is not self._last_reading:
                return False
            known = []
            for stored, digests in described:
                if self._held.get(stored.key) is stored:
                    stored.block_digests = digests
                    known.append(entry_of(stored))
            self._found(known)
            return True

    def shrink_to_capacity(self, most: int) -> list[StoredFile]:
        """Evict what is too much, at most so many objects; they must be removed."""
        with self.lock:
            return self._evict(self._used + self.reserved_bytes - self.capacity, most)

    def entries(self) -> list[IndexEntry]:
        with self.lock:
            return [entry_of(stored) for stored in self._held.values()]

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self.lock:
            return [key in self._held for key in keys]

    # Reading -------------------------------------------------------------------------------------

    def pin(self, place: ObjectLocation) -> StoredFile | None:
        """Keep it from being evicted; None: not there in this size."""
        with self.lock:
            stored = self._held.get(place.key)
            if stored is None or not stored.fits(place):
                return None
            if not stored.pins:
                self._policy.park((stored,))
                self._pinned += stored.room
            stored.pins += 1
            self._policy.use((stored,))
            return stored

    def unpin(self, stored: StoredFile) -> None:
        with self.lock:
            stored.pins -= 1
            if not stored.pins and self._held.get(stored.key) is stored:
                self._pinned -= stored.room
                self._policy.unpark((stored,))

    def drop(self, key: bytes, only: StoredFile | None = None) -> StoredFile | None:
        """Forget a key; what it named. Its room counts as free at once: who still reads it ends soon.

        :param only: unless it names something else by now.
        """
        with self.lock:
            stored = self._held.get(key)
            if stored is None or (only is not None and stored is not only):
                return None
            self._take_out(stored)
            self._tell_gone([key])
            return stored

    def doubt(self, stored: StoredFile) -> None:
        """The system failed to read it. It stays, but a writer of its key is not told that it exists."""
        with self.lock:
            stored.doubtful = True

    # Writing -------------------------------------------------------------------------------------

    def reserve(self, stored: StoredFile, free: int) -> tuple[ObjectStatus, list[StoredFile]]:
        """Room for a new object.

        :param free: bytes that the file system has left. What is reserved counts as not written yet.
        :returns: OK, EXISTS, FULL or TOO_LARGE; and what must be removed first.
        """
        with self.lock:
            held = self._held.get(stored.key)
            if (held is not None and not held.doubtful) or stored.key in self._reserved:
                return ObjectStatus.EXISTS, []
            if stored.room > self.capacity:
                return ObjectStatus.TOO_LARGE, []
            wanted = self.reserved_bytes + stored.room
            found = self._reading.nbytes if self._reading is not None else 0
            short = max(self._used + found + wanted - self.capacity, wanted - free)
            if short > self._used - self._pinned:
                return ObjectStatus.FULL, []
            victims = self._evict(short)
            self._reserved[stored.key] = stored.room
            self._reserved_bytes += stored.room
            return ObjectStatus.OK, victims

    def shrink(self, nbytes: int) -> list[StoredFile]:
        """The disk is full before capacity is: give so much back, if there is anything; what must be removed."""
        with self.lock:
            return self._evict(nbytes)

    def release(self, stored: StoredFile) -> None:
        """Release the room of a file that will not be written."""
        with self.lock:
            self._end_reservation(stored)

    def publish(self, stored: StoredFile) -> StoredFile | None:
        """Make a file visible that is in place; :meth:`tell_published` tells of it.

        :returns: what had its key until now: a doubtful object, or one that was found while this one was written.
        """
        with self.lock:
            self._end_reservation(stored)
            replaced = self._held.get(stored.key)
            if replaced is not None:
                self._take_out(replaced)
            self._admit(stored)
            self._published.append(entry_of(stored))
            if self._reading is not None:
                self._reading.written.append(stored)
            return replaced

    def tell_published(self) -> None:
        """Tell of what was published since this was last called, unless that was told already."""
        with self.lock:
            published, self._published = self._published, []
            if published:
                self._found(published)

    # Looking -------------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        with self.lock:
            return self._reserved_bytes

    def statistics(self) -> IndexStatistics:
        with self.lock:
            return IndexStatistics(
                len(self._held), self._used, self.reserved_bytes, self._evictions, self._evicted_bytes
            )

    def validate(self) -> None:
        """:raises PoolError: the books do not add up."""
        with self.lock:
            self._policy.validate()
            used = sum(stored.room for stored in self._held.values())
            pinned = sum(stored.room for stored in self._held.values() if stored.pins)
            evictable = len(self._held) - sum(stored.pins > 0 for stored in self._held.values())
            if (used, pinned, evictable) != (self._used, self._pinned, len(self._policy)):
                raise PoolError(f"the disk's index miscounts: {(used, pinned, evictable)} by its objects")
            if self._reserved_bytes != sum(self._reserved.values()):
                raise PoolError(f"the disk's index miscounts what is reserved: {self._reserved_bytes} bytes")

    def _evict(self, nbytes: int, most: int | None = None) -> list[StoredFile]:
        victims: list[StoredFile] = []
        while nbytes > 0 and len(victims) != most and (stored := self._policy.victim()) is not None:
            nbytes -= stored.room
            self._left(stored)
            self._evictions += 1
            self._evicted_bytes += stored.room
            victims.append(stored)
        if victims:
            self._tell_gone([stored.key for stored in victims])
        return victims

    def _tell_gone(self, keys: Sequence[bytes]) -> None:
        """Behind what was published before these left: it may be they."""
        self.tell_published()
        self._gone(keys)

    def _end_reservation(self, stored: StoredFile) -> None:
        self._reserved_bytes -= self._reserved.pop(stored.key, 0)

    def _admit(self, stored: StoredFile) -> None:
        self._held[stored.key] = stored
        self._used += stored.room
        self._policy.admit(stored)

    def _take_out(self, stored: StoredFile) -> None:
        """An object that leaves by other ways than eviction; it may be open."""
        if stored.pins:
            self._pinned -= stored.room
        else:
            self._policy.park((stored,))
        self._left(stored)

    def _left(self, stored: StoredFile) -> None:
        del self._held[stored.key]
        self._used -= stored.room
        if self._reading is not None:
            self._reading.departed.add(stored.name)


def entry_of(stored: StoredFile) -> IndexEntry:
    """As the server is told of it."""
    return IndexEntry(stored.key, stored.blocks, stored.tokens, stored.parent, stored.block_digests)

"""Which objects are on disk, how much room they take, and which goes when room is needed.

Used from every thread of the host, under one lock that is never held during a transfer. Who hears of
a key that left (`gone`) hears it before the key can be published again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import IndexEntry, ObjectLocation, ObjectStatus
from layerflow.hosts.disk.format import StoredFile
from layerflow.pool.eviction import S3Fifo


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    objects: int
    used_bytes: int
    reserved_bytes: int
    evictions: int
    evicted_bytes: int


class DiskIndex:
    """:param capacity: most bytes of the disk that files may take, those being written included."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._gone: Callable[[Sequence[bytes]], None] = lambda _: None
        self.lock = threading.RLock()
        self._held: dict[bytes, StoredFile] = {}
        self._reserved: dict[bytes, int] = {}
        self._policy: S3Fifo[StoredFile] = S3Fifo()
        self._used = self._pinned = 0
        self._evictions = self._evicted_bytes = 0

    def tell(self, gone: Callable[[Sequence[bytes]], None]) -> None:
        """Who hears of keys that left."""
        self._gone = gone

    def fill(self, found: Iterable[StoredFile]) -> list[StoredFile]:
        """Start anew with what is on disk, oldest first.

        :returns: what must be removed because there is more of it than capacity.
        """
        with self.lock:
            before = set(self._held)
            self._held, self._policy = {}, S3Fifo()
            self._used = self._pinned = 0
            for stored in found:
                self._held[stored.key] = stored
                self._policy.admit(stored)
                self._used += stored.room
            victims = self._evict(self._used + self.reserved_bytes - self.capacity)
            if lost := before - set(self._held):
                self._gone(list(lost))
            return victims

    def entries(self) -> list[IndexEntry]:
        with self.lock:
            return [IndexEntry(each.key, each.blocks, each.tokens, each.parent) for each in self._held.values()]

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
                self._policy.park(stored)
                self._pinned += stored.room
            stored.pins += 1
            self._policy.use(stored)
            return stored

    def unpin(self, stored: StoredFile) -> None:
        with self.lock:
            stored.pins -= 1
            if not stored.pins and self._held.get(stored.key) is stored:
                self._pinned -= stored.room
                self._policy.unpark(stored)

    def drop(self, key: bytes, only: StoredFile | None = None) -> StoredFile | None:
        """Forget a key; what it named. Its room counts as free at once: who still reads it ends soon.

        :param only: unless it names something else by now.
        """
        with self.lock:
            stored = self._held.get(key)
            if stored is None or (only is not None and stored is not only):
                return None
            if stored.pins:
                self._pinned -= stored.room
            else:
                self._policy.park(stored)
            self._left(stored)
            self._gone([key])
            return stored

    # Writing -------------------------------------------------------------------------------------

    def reserve(self, stored: StoredFile, free: int) -> tuple[ObjectStatus, list[StoredFile]]:
        """Room for a new object.

        :param free: bytes that the file system has left. What is reserved counts as not written yet.
        :returns: OK, EXISTS, FULL or TOO_LARGE; and what must be removed first.
        """
        with self.lock:
            if stored.key in self._held or stored.key in self._reserved:
                return ObjectStatus.EXISTS, []
            if stored.room > self.capacity:
                return ObjectStatus.TOO_LARGE, []
            wanted = self.reserved_bytes + stored.room
            short = max(self._used + wanted - self.capacity, wanted - free)
            if short > self._used - self._pinned:
                return ObjectStatus.FULL, []
            victims = self._evict(short)
            self._reserved[stored.key] = stored.room
            return ObjectStatus.OK, victims

    def shrink(self, nbytes: int) -> list[StoredFile]:
        """The disk is full before capacity is: give so much back, if there is anything; what must be removed."""
        with self.lock:
            return self._evict(nbytes)

    def release(self, stored: StoredFile) -> None:
        """It will not be written."""
        with self.lock:
            self._reserved.pop(stored.key, None)

    def publish(self, stored: StoredFile) -> None:
        """Its file is in place: make it visible."""
        with self.lock:
            self._reserved.pop(stored.key, None)
            if stored.key not in self._held:  # as it is where the folder was read anew just now
                self._held[stored.key] = stored
                self._used += stored.room
                self._policy.admit(stored)

    # Looking -------------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        with self.lock:
            return sum(self._reserved.values())

    def statistics(self) -> IndexStatistics:
        with self.lock:
            return IndexStatistics(
                len(self._held), self._used, self.reserved_bytes, self._evictions, self._evicted_bytes
            )

    def _evict(self, nbytes: int) -> list[StoredFile]:
        victims: list[StoredFile] = []
        while nbytes > 0 and (stored := self._policy.victim()) is not None:
            nbytes -= stored.room
            self._left(stored)
            self._evictions += 1
            self._evicted_bytes += stored.room
            victims.append(stored)
        if victims:
            self._gone([stored.key for stored in victims])
        return victims

    def _left(self, stored: StoredFile) -> None:
        del self._held[stored.key]
        self._used -= stored.room

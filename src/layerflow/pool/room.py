"""Room in the arena: free slots, and objects that are evicted where there are none."""

from __future__ import annotations

from itertools import chain

from layerflow.pool.directory import Directory, DirectoryEntry
from layerflow.pool.eviction import S3Fifo
from layerflow.pool.headers import Headers
from layerflow.pool.slots import Slots

_PATIENCE = 2  # rounds of victims in order that may free no room for a new size


class Room:
    """That of one arena of `nbytes`.

    :ivar policy: complete objects that nobody pins, in the order in which they would go.
    """

    def __init__(self, nbytes: int, directory: Directory, headers: Headers) -> None:
        self.slots = Slots(nbytes)
        self.policy: S3Fifo[DirectoryEntry] = S3Fifo()
        self.evictions = self.evicted_bytes = 0
        self._directory = directory
        self._headers = headers

    def free(self, entry: DirectoryEntry) -> None:
        """The room of an object that is on no books any more."""
        self._headers.erase(entry.located.offset)
        self.slots.free(entry.located.offset)

    def place(self, wanted: dict[int, list[int]]) -> list[tuple[int, int, int]]:
        """(index, offset, room) for what fits: runs per size if all fits, else one by one in the caller's order."""
        placed: list[tuple[int, int, int]] = []
        pending: list[int] = []
        for room, indices in wanted.items():
            offsets = self._make_room(room, len(indices), pending)
            placed += ((index, offset, room) for index, offset in zip(indices, offsets, strict=False))
            if len(offsets) < len(indices) and len(wanted) > 1:
                break
        else:
            return placed
        for offset in pending:
            self.slots.free(offset)
        pending.clear()
        in_order = sorted((index, room) for room, indices in wanted.items() for index in indices)
        return [(index, offset, room) for index, room in in_order for offset in self._make_room(room, 1, pending)]

    def _make_room(self, room: int, count: int, pending: list[int]) -> list[int]:
        """Up to `count` offsets, ascending. Evicts only where that leads to at least one more.

        :param pending: offsets of this call that are on no books yet; the new ones are added.
        """
        slots, policy = self.slots, self.policy
        offsets = slots.alloc(room, count)
        pending += offsets
        patience = _PATIENCE
        while (missing := count - len(offsets)) and len(policy):
            window: list[int] | None = None
            if not policy.of_size(room) or not patience:
                window = slots.window(room, chain(self._directory.held(), pending))
                if window is None and not policy.of_size(room):
                    break
            if window is not None and not patience:
                for offset in window:
                    entry = self._directory.at[offset]
                    policy.park((entry,))
                    self._evicted(entry)
            else:
                self._evict_in_order(missing * room)
            more = slots.alloc(room, missing)
            offsets += more
            pending += more
            patience = _PATIENCE if more else max(patience - 1, 0)
        return sorted(offsets)

    def _evict_in_order(self, nbytes: int) -> None:
        victim = self.policy.victim
        while nbytes > 0 and (entry := victim()) is not None:
            nbytes -= entry.room
            self._evicted(entry)

    def _evicted(self, entry: DirectoryEntry) -> None:
        self._directory.hide(entry)
        self.free(entry)
        self.evictions += 1
        self.evicted_bytes += entry.room

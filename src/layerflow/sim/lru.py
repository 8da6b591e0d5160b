"""Least recently used, to compare CAR with: what other simulators assume of a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Generic

from layerflow.errors import PoolError
from layerflow.pool.eviction import ItemT, Queue


class Lru(Generic[ItemT]):
    """A :class:`layerflow.pool.eviction.EvictionPolicy`: whoever was read last goes last.

    Reading pins an object, so that the order in which objects are unparked is the order of their last use.
    """

    def __init__(self) -> None:
        self._queue: Queue[ItemT] = Queue()
        self._by_room: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._queue)

    def of_size(self, room: int) -> int:
        """How many objects give back exactly `room` bytes."""
        return self._by_room[room]

    def admit(self, item: ItemT) -> None:
        """A new object may be evicted from now on."""
        self.unpark((item,))

    def use(self, items: Iterable[ItemT]) -> None:
        """Nothing to note: what is read is parked, and stands last when it comes back."""

    def park(self, items: Collection[ItemT]) -> None:
        """Take out objects that may not be evicted, or are no longer there."""
        self._queue.remove(items)
        self._by_room.subtract(item.room for item in items)

    def unpark(self, items: Collection[ItemT]) -> None:
        """Let these be evicted again, last of all."""
        self._queue.append(items)
        self._by_room.update(item.room for item in items)

    def victim(self) -> ItemT | None:
        """The object to evict now, taken out of the order; None where nothing may go."""
        if not self._queue:
            return None
        item = self._queue.pop()
        self._by_room[item.room] -= 1
        return item

    def validate(self) -> None:
        """:raises PoolError: the books do not add up."""
        if Counter(item.room for item in self._queue) != +self._by_room:
            raise PoolError("eviction counts sizes that its queue does not hold")

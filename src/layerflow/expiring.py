"""Keys that each last until a time: a bounded memory of them, and a heap that tells whose time is over."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Set
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ExpiringSet(Generic[Key]):
    """Keys that are each remembered until a time, in seconds on one clock of the caller's.

    Adding a key to a full set forgets the key that was added longest ago: whatever a client sends, the set stays small.
    A key whose time is over still counts, in :func:`len` and for `in`, until :meth:`expire` or a newer key removes it.

    :param most: keys that fit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: OrderedDict[Key, float] = OrderedDict()  #: in the order in which the keys were last added

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: object) -> bool:
        return key in self._until

    def add(self, key: Key, until: float = math.inf) -> Key | None:
        """Remember a key until this time, also where it was to be remembered for longer.

        :returns: the key that was forgotten to make room; None = there was room.
        """
        self._until[key] = until
        self._until.move_to_end(key)
        return self._until.popitem(last=False)[0] if len(self._until) > self._most else None

    def discard(self, key: Key) -> bool:
        """Forget a key. Return whether it was in the set."""
        return self._until.pop(key, None) is not None

    def holds(self, key: Key, now: float) -> bool:
        """Return whether the key's time is not over."""
        return self._until.get(key, now) > now

    def seconds_left(self, key: Key, now: float) -> float:
        """Return how long the key is still remembered; 0 = it is not."""
        return max(0.0, self._until.get(key, now) - now)

    def among(self, keys: Iterable[Key], now: float) -> Set[Key]:
        """Return those of `keys` whose time is not over."""
        if not self._until:  # nearly always
            return frozenset()
        return {key for key in keys if self._until.get(key, now) > now}

    def expire(self, now: float, most: float = math.inf) -> list[Key]:
        """Forget keys whose time is over, oldest first, as far as the first one whose time is not.

        These are all of them where every key is remembered equally long. The others are not looked at: of thousands of
        keys few end at a time.

        :param most: keys that are forgotten at a time.
        :returns: the keys that were forgotten.
        """
        gone: list[Key] = []
        while self._until and len(gone) < most and next(iter(self._until.values())) <= now:
            gone.append(self._until.popitem(last=False)[0])
        return gone


_STALE = 256
"""Entries of a heap that may be stale beyond twice as many as there are keys."""


class ExpiryHeap(Generic[Key]):
    """Keys that each end at a time, in seconds on one clock of the caller's; ``inf`` = they never end by themselves.

    A key gets a new entry in the heap whenever its time is set, and its older ones are passed over once they are the
    first: setting, discarding and ending a key take a time that grows with the logarithm of their number.
    """

    def __init__(self) -> None:
        self._entry: dict[Key, tuple[float, int, Key]] = {}  #: the valid one of each key; the others are stale
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0  #: tells entries of one time apart, for keys need not compare

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys in the order in which they were first set."""
        return iter(self._entry)

    def __contains__(self, key: object) -> bool:
        return key in self._entry

    @property
    def entries(self) -> int:
        """How many entries the heap has, stale ones included."""
        return len(self._heap)

    def until(self, key: Key) -> float:
        """Return when a key ends; ``-inf`` = there is no such key."""
        entry = self._entry.get(key)
        return -math.inf if entry is None else entry[0]

    def set(self, key: Key, until: float) -> None:
        """Let a key end at this time, whenever it was to end before."""
        self._serial += 1
        entry = self._entry[key] = until, self._serial, key
        if until < math.inf:
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._entry) + _STALE:
                self._heap = [each for each in self._heap if self._entry.get(each[2]) is each]
                heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        """Forget a key."""
        self._entry.pop(key, None)

    def expire(self, now: float) -> Iterator[Key]:
        """Yield the keys that end at or before `now`, soonest first; each is forgotten as it is yielded.

        The caller may set and discard keys meanwhile.
        """
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            key = entry[2]
            if self._entry.get(key) is entry:
                del self._entry[key]
                yield key

    def due(self, now: float) -> bool:
        """May some key end at or before `now`? Where not, certainly none does."""
        return bool(self._heap) and self._heap[0][0] <= now

    def complete(self) -> bool:
        """Return whether each key that ends is in the heap: an invariant."""
        listed = set(map(id, self._heap))
        return all(entry[0] == math.inf or id(entry) in listed for entry in self._entry.values())

"""Which object goes when room is needed: CAR, "clock with adaptive replacement".

Bansal and Modha, FAST 2004, in bytes. New objects wait in one queue, and those that were read since in another, so
that a scan of objects that nobody comes back for leaves without pushing out what is used. How much of the room the
first one may keep follows what comes back after it has left: what left the first queue too early makes it larger, what
left the second one smaller. Where prompts are mostly continued soon, that is near to least recently used.

Pinned objects are taken out of the queues (parked): a victim is found in amortised O(1) however many
objects are pinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

from layerflow.errors import PoolError

LEAST_SHARE, MOST_SHARE = 0.05, 0.95
"""Of the evictable bytes: between these lies what the queue of new objects may keep; half of them to begin with."""

MOST_MOVES = 16  # of objects that stay, for one victim; where all of many were used, the others move for the next ones
_MIN_LEFT = 64


class Evictable:
    """What the policy keeps with each object."""

    __slots__ = ("after", "before", "key", "proven", "room", "used")

    def __init__(self, key: bytes, room: int) -> None:
        self.key = key
        self.room = room  #: bytes that come free when it goes
        self.used = False  #: since it came into its queue, or was last passed over
        self.proven = False  #: belongs to the queue of those that were read again
        self.before: Any = None  #: the neighbours in its queue, which keeps them; None in no queue
        self.after: Any = None


ItemT = TypeVar("ItemT", bound=Evictable)


class Queue(Generic[ItemT]):
    """Items in order, each of which knows its neighbours: no table of all of them has to be made anew when it is full,
    which would stop the loop for as long as there are items.
    """

    def __init__(self) -> None:
        self._ends = ends = Evictable(b"", 0)
        ends.before = ends.after = ends
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ItemT]:
        ends = self._ends
        item = ends.after
        while item is not ends:
            yield item
            item = item.after

    def append(self, items: Collection[ItemT]) -> None:
        """Add these last, in this order."""
        ends = self._ends
        last = ends.before
        for item in items:
            item.before, last.after = last, item
            last = item
        last.after, ends.before = ends, last
        self._length += len(items)

    def push_first(self, item: ItemT) -> None:
        """Put one before all others."""
        ends = self._ends
        item.before, item.after = ends, ends.after
        ends.after.before = item
        ends.after = item
        self._length += 1

    def remove(self, items: Collection[ItemT]) -> None:
        """Remove these, which are in it."""
        for item in items:
            before, after = item.before, item.after
            before.after, after.before = after, before
            item.before = item.after = None
        self._length -= len(items)

    def pop(self) -> ItemT:
        """The first leaves; there is one."""
        item = cast("ItemT", self._ends.after)
        self.remove((item,))
        return item


class EvictionPolicy(Protocol[ItemT]):
    """What the pool needs of an order in which objects go; see :class:`AdaptiveClock` for what each method does."""

    def __len__(self) -> int: ...

    def of_size(self, room: int) -> int: ...

    def admit(self, item: ItemT) -> None: ...

    def use(self, items: Iterable[ItemT]) -> None: ...

    def park(self, items: Collection[ItemT]) -> None: ...

    def unpark(self, items: Collection[ItemT]) -> None: ...

    def victim(self) -> ItemT | None: ...

    def validate(self) -> None: ...


class LeftKeys:
    """The keys that have left a queue lately."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}  # by key, which of all that left it was
        self._order: deque[bytes] = deque()
        self._count = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, key: bytes, most: int) -> None:
        """One has left; at most so many are remembered."""
        self._count += 1
        self._numbers[key] = self._count
        self._order.append(key)
        # Two for one: where many objects were pinned at once, the keys beyond are not forgotten in one go.
        for _ in range(min(2, len(self._order) - most)):
            oldest = self._count - len(self._order) + 1
            forgotten = self._order.popleft()
            if self._numbers.get(forgotten) == oldest:  # not one that came back, or left again later
                del self._numbers[forgotten]

    def take(self, key: bytes) -> bool:
        """Has this one left lately? Then it is forgotten: it is back."""
        return self._numbers.pop(key, None) is not None


class AdaptiveClock(Generic[ItemT]):
    """The eviction order of the objects that may go.

    :ivar moves: of objects that stayed, for all victims so far.
    :ivar share: of the evictable bytes, what new objects may keep.
    """

    def __init__(self) -> None:
        self._new: Queue[ItemT] = Queue()
        self._proven: Queue[ItemT] = Queue()
        self._left_new, self._left_proven = LeftKeys(), LeftKeys()
        self._new_bytes = self._proven_bytes = 0
        self.share = 0.5
        self.moves = 0
        self._by_room: Counter[int] = Counter()

    def __len__(self) -> int:
        """Objects that may be evicted now."""
        return len(self._new) + len(self._proven)

    def of_size(self, room: int) -> int:
        """How many of them give back exactly `room` bytes."""
        return self._by_room.get(room, 0)

    def admit(self, item: ItemT) -> None:
        """A new object may be evicted from now on."""
        new, proven = self._left_new, self._left_proven
        # Whoever is back has left its queue too early. The fewer left that one lately, the more its return says.
        if new.take(item.key):
            item.proven = True
            self._grow(item.room * max(1.0, len(proven) / (len(new) + 1)))
        elif proven.take(item.key):
            item.proven = True
            self._grow(-item.room * max(1.0, len(new) / (len(proven) + 1)))
        self.unpark((item,))

    def use(self, items: Iterable[ItemT]) -> None:
        """Note that these objects were read."""
        for item in items:
            item.used = True

    def park(self, items: Collection[ItemT]) -> None:
        """Take out objects that may not be evicted (they are pinned), or are no longer there."""
        new, proven = _split(items)
        self._new.remove(new)
        self._proven.remove(proven)
        self._new_bytes -= self._uncount(new)
        self._proven_bytes -= self._uncount(proven)

    def unpark(self, items: Collection[ItemT]) -> None:
        """Let these objects be evicted again, last of their queues."""
        new, proven = _split(items)
        self._new.append(new)
        self._proven.append(proven)
        self._new_bytes += self._count(new)
        self._proven_bytes += self._count(proven)

    def victim(self) -> ItemT | None:
        """The object to evict now, taken out of the order; None where nothing may go.

        At most :data:`MOST_MOVES` objects that stay move meanwhile. Then new objects have to wait, and of the proven
        ones that were passed over the first goes.
        """
        new, proven = self._new, self._proven
        moves = 0
        passed: ItemT | None = None
        while new or proven:
            share = self.share * (self._new_bytes + self._proven_bytes)
            if new and (not proven or (self._new_bytes >= share and moves < MOST_MOVES)):
                item = new.pop()
                self._new_bytes -= item.room
                if item.used:
                    item.proven, item.used = True, False
                    proven.append((item,))
                    self._proven_bytes += item.room
                    moves += 1
                    continue
                self._left_new.add(item.key, max(len(self), _MIN_LEFT))
            else:
                item = proven.pop()
                if item.used and moves < MOST_MOVES:
                    item.used = False
                    proven.append((item,))
                    moves += 1
                    passed = passed or item
                    continue
                if item.used and passed is not None:
                    proven.push_first(item)
                    item = passed
                    proven.remove((item,))
                self._proven_bytes -= item.room
                self._left_proven.add(item.key, max(len(self), _MIN_LEFT))
            self.moves += moves
            self._uncount((item,))
            return item
        return None

    def validate(self) -> None:
        """:raises PoolError: the books do not add up."""
        sizes = Counter(item.room for queue in (self._new, self._proven) for item in queue)
        if sizes != self._by_room:
            raise PoolError("eviction counts sizes that its queues do not hold")
        for queue, nbytes, proven in ((self._new, self._new_bytes, False), (self._proven, self._proven_bytes, True)):
            if nbytes != sum(item.room for item in queue) or any(item.proven is not proven for item in queue):
                raise PoolError(f"the queue of {'proven' if proven else 'new'} objects miscounts them")

    def _grow(self, nbytes: float) -> None:
        """Let new objects keep so many bytes more."""
        share = self.share + nbytes / (self._new_bytes + self._proven_bytes + abs(nbytes))
        self.share = min(MOST_SHARE, max(LEAST_SHARE, share))

    def _count(self, items: Collection[ItemT]) -> int:
        """Count objects by their size; how many bytes they are."""
        nbytes = 0
        for room, count in _rooms(items).items():
            self._by_room[room] += count
            nbytes += room * count
        return nbytes

    def _uncount(self, items: Collection[ItemT]) -> int:
        """The inverse of :meth:`_count`."""
        by_room, nbytes = self._by_room, 0
        for room, count in _rooms(items).items():
            nbytes += room * count
            left = by_room[room] - count
            if left:
                by_room[room] = left
            else:
                del by_room[room]
        return nbytes


def _split(items: Collection[ItemT]) -> tuple[Collection[ItemT], Collection[ItemT]]:
    """Those that are new, and those that are proven."""
    new = [item for item in items if not item.proven]
    return new, [item for item in items if item.proven] if len(new) < len(items) else ()


def _rooms(items: Iterable[Evictable]) -> dict[int, int]:
    """How many of them give back so many bytes; of a prompt's chunks all give back the same."""
    rooms = [item.room for item in items]
    if rooms and rooms.count(rooms[0]) == len(rooms):
        return {rooms[0]: len(rooms)}
    return Counter(rooms)

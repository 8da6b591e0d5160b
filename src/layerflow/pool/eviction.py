"""Which object goes when room is needed: S3-FIFO.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New objects wait in a small
queue and must be used twice there to reach the main one, so a scan of objects that nobody comes back
for leaves without pushing out what is used; keys that left lately are remembered (ghosts) and go
straight to the main queue when they return.

Pinned objects are taken out of the queues (parked): a victim is found in amortised O(1) however many
objects are pinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

from layerflow.errors import PoolError

SMALL_SHARE = 0.1  # of the evictable bytes; the paper's value
MAX_USES = 3
PROMOTE_USES = 2
MOST_MOVES = 16  # of objects that stay, for one victim; where all of many were used, the others move for the next ones
_MIN_GHOSTS = 64


class Evictable:
    """What the policy keeps with each object."""

    __slots__ = ("after", "before", "key", "proven", "room", "uses")

    def __init__(self, key: bytes, room: int) -> None:
        self.key = key
        self.room = room  #: bytes that come free when it goes
        self.uses = 0
        self.proven = False  #: belongs to the main queue
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
    """What the pool needs of an order in which objects go; see :class:`S3Fifo` for what each method does."""

    def __len__(self) -> int: ...

    def of_size(self, room: int) -> int: ...

    def admit(self, item: ItemT) -> None: ...

    def use(self, items: Iterable[ItemT]) -> None: ...

    def park(self, items: Collection[ItemT]) -> None: ...

    def unpark(self, items: Collection[ItemT]) -> None: ...

    def victim(self) -> ItemT | None: ...

    def validate(self) -> None: ...


class S3Fifo(Generic[ItemT]):
    """The eviction order of the objects that may go.

    :ivar moves: of objects that stayed, for all victims so far.
    """

    def __init__(self) -> None:
        self._small: Queue[ItemT] = Queue()
        self._main: Queue[ItemT] = Queue()
        self._ghosts: dict[bytes, int] = {}  # by key, which of all victims it was
        self._left: deque[bytes] = deque()  # the keys of the latest victims
        self._victims = 0
        self._small_bytes = 0
        self._main_bytes = 0
        self.moves = 0
        self._by_room: Counter[int] = Counter()

    def __len__(self) -> int:
        """Objects that may be evicted now."""
        return len(self._small) + len(self._main)

    def of_size(self, room: int) -> int:
        """How many of them give back exactly `room` bytes."""
        return self._by_room.get(room, 0)

    def admit(self, item: ItemT) -> None:
        """A new object may be evicted from now on."""
        if self._ghosts.pop(item.key, None) is not None:
            item.proven = True
        self.unpark((item,))

    def use(self, items: Iterable[ItemT]) -> None:
        """Note that these objects were read."""
        for item in items:
            uses = item.uses
            if uses < MAX_USES:
                item.uses = uses + 1

    def park(self, items: Collection[ItemT]) -> None:
        """Take out objects that may not be evicted (they are pinned), or are no longer there."""
        small = [item for item in items if not item.proven]
        main = [item for item in items if item.proven] if len(small) < len(items) else []
        self._small.remove(small)
        self._main.remove(main)
        self._small_bytes -= sum([item.room for item in small])
        self._main_bytes -= sum([item.room for item in main])
        self._uncount(items)

    def unpark(self, items: Collection[ItemT]) -> None:
        """Let these objects be evicted again, last of their queues."""
        small = [item for item in items if not item.proven]
        main = [item for item in items if item.proven] if len(small) < len(items) else []
        self._small.append(small)
        self._main.append(main)
        self._small_bytes += sum([item.room for item in small])
        self._main_bytes += sum([item.room for item in main])
        for room, count in _rooms(items).items():
            self._by_room[room] += count

    def victim(self) -> ItemT | None:
        """The object to evict now, taken out of the order; None where nothing may go.

        At most :data:`MOST_MOVES` objects that stay move meanwhile. Then the small queue has to wait, and of the main
        queue's objects that were passed over the one goes that was used least.
        """
        small, main = self._small, self._main
        moves, least = 0, None
        while small or main:
            share = SMALL_SHARE * (self._small_bytes + self._main_bytes)
            if small and (not main or (self._small_bytes >= share and moves < MOST_MOVES)):
                item = small.pop()
                self._small_bytes -= item.room
                if item.uses >= PROMOTE_USES:
                    item.proven, item.uses = True, 0
                    main.append((item,))
                    self._main_bytes += item.room
                    self.moves += 1
                    moves += 1
                    continue
                self._remember(item.key)
            else:
                item = main.pop()
                if item.uses and moves < MOST_MOVES:
                    item.uses -= 1
                    main.append((item,))
                    self.moves += 1
                    moves += 1
                    if least is None or item.uses < least.uses:
                        least = item
                    continue
                if item.uses and least is not None and least.uses < item.uses:
                    main.push_first(item)
                    item = least
                    main.remove((item,))
                self._main_bytes -= item.room
            self._uncount((item,))
            return item
        return None

    def validate(self) -> None:
        """:raises PoolError: the books do not add up."""
        sizes = Counter(item.room for queue in (self._small, self._main) for item in queue)
        if sizes != self._by_room:
            raise PoolError("eviction counts sizes that its queues do not hold")
        for queue, nbytes, proven in ((self._small, self._small_bytes, False), (self._main, self._main_bytes, True)):
            if nbytes != sum(item.room for item in queue) or any(item.proven is not proven for item in queue):
                raise PoolError(f"the {'main' if proven else 'small'} queue of eviction miscounts its objects")

    def _remember(self, key: bytes) -> None:
        self._victims += 1
        self._ghosts[key] = self._victims
        self._left.append(key)
        most = max(len(self._small) + len(self._main), _MIN_GHOSTS)
        # Two for one: where many objects were pinned at once, the ghosts beyond are not forgotten in one go.
        for _ in range(min(2, len(self._left) - most)):
            oldest = self._victims - len(self._left) + 1
            forgotten = self._left.popleft()
            if self._ghosts.get(forgotten) == oldest:  # not one that came back, or left again later
                del self._ghosts[forgotten]

    def _uncount(self, items: Collection[ItemT]) -> None:
        by_room = self._by_room
        for room, count in _rooms(items).items():
            left = by_room[room] - count
            if left:
                by_room[room] = left
            else:
                del by_room[room]


def _rooms(items: Iterable[Evictable]) -> dict[int, int]:
    """How many of them give back so many bytes; of a prompt's chunks all give back the same."""
    rooms = [item.room for item in items]
    if rooms and rooms.count(rooms[0]) == len(rooms):
        return {rooms[0]: len(rooms)}
    return Counter(rooms)

"""Room in the arena: slots of one size each, carved out of extents, handed out in ascending runs.

Objects of one size lie at one stride, so that the same layer of consecutive chunks is one strided
copy. An extent of slots belongs to its size class while any slot is in use; empty, it goes back to the
common stock (:class:`FreeRuns`), where another size may take it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Generic, TypeVar

from layerflow.errors import PoolError

# Free runs of granules: the arena's common stock, from which size classes take their extents.


class FreeRuns:
    """Which granules are free, as maximal runs; first fit by address, so that low (warm) memory goes first.

    :param granules: how many there are; all start free.
    """

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.free = granules  #: granules in all runs together
        self._starts: list[int] = [0] if granules else []
        self._length: dict[int, int] = {0: granules} if granules else {}
        self._no_longer_than = granules  # upper bound of every run: makes a search that must fail free

    def largest(self) -> int:
        """Granules of the longest free run. O(runs)."""
        self._no_longer_than = max(self._length.values(), default=0)
        return self._no_longer_than

    def may_hold(self, granules: int) -> bool:
        """False only where no free run is that long. O(1)."""
        return granules <= self._no_longer_than

    def take(self, granules: int) -> int | None:
        """The first granule of a run of `granules`, now taken; None where no run is that long."""
        if not self.may_hold(granules):
            return None
        for index, start in enumerate(self._starts):
            length = self._length[start]
            if length < granules:
                continue
            del self._length[start]
            if length == granules:
                del self._starts[index]
            else:
                self._starts[index] = start + granules
                self._length[start + granules] = length - granules
            self.free -= granules
            return start
        self._no_longer_than = granules - 1
        return None

    def give(self, start: int, granules: int) -> None:
        """Take back a run that :meth:`take` gave out."""
        starts, lengths = self._starts, self._length
        self.free += granules
        index = bisect_left(starts, start)
        if index < len(starts) and starts[index] == start + granules:
            granules += lengths.pop(starts.pop(index))
        if index and starts[index - 1] + lengths[starts[index - 1]] == start:
            start = starts[index - 1]
            granules += lengths[start]
        else:
            insort(starts, start)
        lengths[start] = granules
        self._no_longer_than = max(self._no_longer_than, granules)

    def runs(self) -> list[tuple[int, int]]:
        """(first granule, granules) of every free run, ascending."""
        return [(start, self._length[start]) for start in self._starts]

    def validate(self) -> None:
        """:raises PoolError: runs overlap, touch, or do not add up."""
        end = -1
        for start, length in self.runs():
            if start <= end or length < 1 or length > self._no_longer_than or start + length > self.granules:
                raise PoolError(f"free run of {length} granules at {start} overlaps or touches one that ends at {end}")
            end = start + length
        if self.free != sum(self._length.values()) or len(self._length) != len(self._starts):
            raise PoolError(f"{self.free} granules are counted as free, the runs hold {sum(self._length.values())}")


# What lies where in the arena, by offset.


ThingT = TypeVar("ThingT")

_PARTS = 64


class ByOffset(Generic[ThingT]):
    """A dictionary for each part of the arena: one of all would stop the loop when it is full and made anew.

    :param nbytes: of the arena; every offset is below.
    """

    def __init__(self, nbytes: int) -> None:
        self._part = nbytes // _PARTS + 1
        self._parts: list[dict[int, ThingT]] = [{} for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, offset: int) -> ThingT:
        return self._parts[offset // self._part][offset]

    def __setitem__(self, offset: int, thing: ThingT) -> None:
        self._parts[offset // self._part][offset] = thing

    def pop(self, offset: int) -> ThingT | None:
        """What was there, which is there no more; None: nothing."""
        index = offset // self._part
        return self._parts[index].pop(offset, None) if 0 <= index < _PARTS else None

    def items(self) -> Iterator[tuple[int, ThingT]]:
        """Offsets and what is there; ascending by part only."""
        return chain.from_iterable(part.items() for part in self._parts)


DEFAULT_ALIGNMENT = 64
MIN_GRANULE_BYTES = 4096
MAX_GRANULE_BYTES = 1 << 20
_GRANULES_AIMED_AT = 1 << 16
_EXTENT_BYTES = 8 << 20  # what an extent has at least, on a large arena
_EXTENTS_AIMED_AT = 32  # on a small arena, so that one size does not own all of it
_MAX_WASTE = 1 / 16  # of an extent left unused, where a few more slots allow that
_MORE_SLOTS = 16
_FIRST = attrgetter("first")
_LOOK_AT = 32  # partly used extents that one allocation searches for a long run


class Extent:
    """Consecutive slots of one size. Bit i of `free` says that slot i is free.

    :ivar evictable: how many slots have objects that may be evicted; counted by whoever knows the objects.
    """

    __slots__ = ("base", "evictable", "first", "free", "granules", "slots", "stride")

    def __init__(self, first: int, granules: int, base: int, stride: int, slots: int) -> None:
        self.first = first
        self.granules = granules
        self.base = base
        self.stride = stride
        self.slots = slots
        self.free = (1 << slots) - 1
        self.evictable = 0

    @property
    def used(self) -> int:
        return self.slots - self.free.bit_count()

    def offsets(self) -> list[int]:
        """Offsets of the slots in use, ascending."""
        return [self.base + slot * self.stride for slot in range(self.slots) if not self.free >> slot & 1]

    def runs(self) -> list[tuple[int, int]]:
        """(length, first slot) of every run of free slots."""
        found, mask, at = [], self.free, 0
        while mask:
            skip = (mask & -mask).bit_length() - 1
            mask >>= skip
            length = (mask ^ (mask + 1)).bit_length() - 1
            found.append((length, at + skip))
            mask >>= length
            at += skip + length
        return found


class _SizeClass:
    __slots__ = ("extents", "granules", "partial", "stride")

    def __init__(self, stride: int, granule: int, total: int) -> None:
        self.stride = stride
        aim = max(stride, min(_EXTENT_BYTES, total * granule // _EXTENTS_AIMED_AT))
        usual, least_waste = -(-stride // granule), 1.0
        for slots in range(-(-aim // stride), aim // stride + _MORE_SLOTS):
            granules = -(-slots * stride // granule)
            waste = 1 - slots * stride / (granules * granule)
            if granules > total or least_waste <= _MAX_WASTE:
                break
            if waste < least_waste:
                usual, least_waste = granules, waste
        self.granules = usual
        self.extents = 0
        self.partial: dict[Extent, None] = {}  # extents with a free slot, longest known first


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """A snapshot. `used_bytes` counts whole slots, `unassigned_bytes` what no size owns.

    `largest_free_bytes` is the largest object that finds room without eviction: in what no size owns, or, for
    an object of just that size, in a free slot.
    """

    capacity_bytes: int
    used_bytes: int
    unassigned_bytes: int
    largest_free_bytes: int
    objects: int
    extents: int
    classes: int


class Slots:
    """The allocator: pure bookkeeping of byte ranges ``0:nbytes``, one thread.

    :param nbytes: bytes to hand out; what does not fill a granule at the end is not used.
    :param alignment: every offset is a multiple of it; a power of two, at most 4096.
    :raises PoolError: the alignment is no such number.
    """

    def __init__(self, nbytes: int, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if not 0 < alignment <= MIN_GRANULE_BYTES or alignment & (alignment - 1):
            raise PoolError(f"alignment {alignment} must be a power of two up to {MIN_GRANULE_BYTES}")
        wanted = max(nbytes // _GRANULES_AIMED_AT, 1)
        power = 1 << (wanted.bit_length() - 1)
        self.granule_bytes = min(max(power, MIN_GRANULE_BYTES), MAX_GRANULE_BYTES)
        self.alignment = alignment
        self.used_bytes = 0
        self._stock = FreeRuns(nbytes // self.granule_bytes)
        self.capacity_bytes = self._stock.granules * self.granule_bytes  #: also the largest possible object
        self._classes: dict[int, _SizeClass] = {}
        self._extents: list[Extent] = []  # by their first granule
        self._at: ByOffset[Extent] = ByOffset(nbytes)

    def stride(self, nbytes: int) -> int:
        """The slot size that holds an object of `nbytes`."""
        return -(-nbytes // self.alignment) * self.alignment

    def footprint(self, nbytes: int) -> float:
        """Bytes that an object of `nbytes` takes of an arena full of such objects.

        Its slot, and its share of what an extent of these slots leaves unused.
        """
        stride = self.stride(nbytes)
        room = _SizeClass(stride, self.granule_bytes, self._stock.granules).granules * self.granule_bytes
        return room / max(1, room // stride)

    def alloc(self, nbytes: int, count: int = 1) -> list[int]:
        """Room for up to `count` objects of `nbytes` each: ascending offsets, in runs where possible.

        :returns: fewer than `count` offsets where there is no more room; nothing is ever moved or evicted.
        :raises PoolError: `nbytes` is not positive.
        """
        if nbytes < 1:
            raise PoolError(f"an object of {nbytes} bytes: the size must be positive")
        stride = self.stride(nbytes)
        size_class = self._classes.get(stride)
        if size_class is None:
            if stride > self.capacity_bytes:
                return []
            size_class = self._classes[stride] = _SizeClass(stride, self.granule_bytes, self._stock.granules)
        offsets: list[int] = []
        if count > 1:
            self._take_runs(size_class, count, offsets)
        while len(offsets) < count:  # holes, then fresh room for what is left
            extent = next(iter(size_class.partial), None) or self._grow(size_class)
            if extent is None:
                break
            self._use(size_class, extent, _lowest(extent.free), 1, offsets)
        if not size_class.extents:
            del self._classes[stride]
        offsets.sort()
        return offsets

    def free(self, offset: int) -> int:
        """Give back the room at `offset`; the bytes that came free.

        :raises PoolError: nothing is allocated there.
        """
        extent = self._at.pop(offset)
        if extent is None:
            raise PoolError(f"no object starts at arena offset {offset}; was it freed twice?")
        size_class = self._classes[extent.stride]
        if not extent.free:
            size_class.partial[extent] = None
        extent.free |= 1 << ((offset - extent.base) // extent.stride)
        self.used_bytes -= extent.stride
        if extent.free == (1 << extent.slots) - 1:
            del size_class.partial[extent]
            del self._extents[bisect_left(self._extents, extent.first, key=_FIRST)]
            self._stock.give(extent.first, extent.granules)
            size_class.extents -= 1
            if not size_class.extents:
                del self._classes[extent.stride]
        return extent.stride

    def extent_at(self, offset: int) -> Extent:
        """The extent of the slot in use that begins at `offset`."""
        return self._at[offset]

    def extents(self) -> list[Extent]:
        """All extents, by their place."""
        return list(self._extents)

    def window(self, nbytes: int) -> list[int] | None:
        """The cheapest neighbourhood to empty so that an object of `nbytes` of a new size fits.

        :returns: offsets of the objects to free, fewest bytes first choice; None where each neighbourhood has an
            object that must stay. O(extents): for when taking victims in order has not helped.
        """
        wanted = -(-self.stride(nbytes) // self.granule_bytes)
        ordered = self._extents
        best: tuple[int, int, int] | None = None
        left, cost, floor = 0, 0, 0  # floor: first granule after the extent left of the window
        for right, extent in enumerate(ordered):
            used = extent.used
            if extent.evictable < used:
                left, cost, floor = right + 1, 0, extent.first + extent.granules
                continue
            cost += used * extent.stride
            after = ordered[right + 1].first if right + 1 < len(ordered) else self._stock.granules
            while left <= right:
                gone = ordered[left]
                if after - (gone.first + gone.granules) < wanted:  # still needed
                    break
                left, cost, floor = left + 1, cost - gone.used * gone.stride, gone.first + gone.granules
            if left <= right and after - floor >= wanted and (best is None or cost < best[0]):
                best = (cost, left, right)
        if best is None:
            return None
        chosen = ordered[best[1] : best[2] + 1]
        return [offset for extent in chosen for offset in extent.offsets()]

    def statistics(self) -> SlotStatistics:
        return SlotStatistics(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            unassigned_bytes=self._stock.free * self.granule_bytes,
            largest_free_bytes=max(
                self._stock.largest() * self.granule_bytes,
                max((stride for stride, known in self._classes.items() if known.partial), default=0),
            ),
            objects=len(self._at),
            extents=len(self._extents),
            classes=len(self._classes),
        )

    def validate(self) -> None:
        """:raises PoolError: ranges overlap, or the books do not add up."""
        self._stock.validate()
        pieces = sorted([(extent.first, extent.granules) for extent in self._extents] + self._stock.runs())
        end = 0
        for first, granules in pieces:
            if first != end:
                raise PoolError(f"granules {end}:{first} are in two places or in none")
            end = first + granules
        if end != self._stock.granules:
            raise PoolError(f"granules {end}:{self._stock.granules} are in no place")
        offsets = {offset: extent for extent in self._extents for offset in extent.offsets()}
        if offsets != dict(self._at.items()) or self.used_bytes != sum(extent.stride for extent in offsets.values()):
            raise PoolError("the slots in use differ from the objects on the books")
        if any(after.first <= extent.first for extent, after in pairwise(self._extents)):
            raise PoolError("extents are not listed by their place")
        for extent in self._extents:
            known = self._classes[extent.stride]
            if not extent.used or (extent in known.partial) != bool(extent.free):
                raise PoolError(f"extent at granule {extent.first} is filed under the wrong state")
            if extent.slots * extent.stride > extent.granules * self.granule_bytes:
                raise PoolError(f"extent at granule {extent.first} has more slots than fit")
        if sum(known.extents for known in self._classes.values()) != len(self._extents):
            raise PoolError("size classes count extents that do not exist")

    def _take_runs(self, size_class: _SizeClass, count: int, offsets: list[int]) -> None:
        """Up to `count` slots: one run that holds all, else fresh extents, else the longest runs there are."""
        runs = sorted(
            (length, -extent.base, -start, extent)
            for extent in islice(size_class.partial, _LOOK_AT)
            for length, start in extent.runs()
        )
        fitting = bisect_left(runs, count, key=lambda run: run[0])
        if fitting < len(runs):
            _, _, start, extent = runs[fitting]
            self._use(size_class, extent, -start, count, offsets)
            return
        while len(offsets) < count and (extent_or_none := self._grow(size_class)) is not None:
            self._use(size_class, extent_or_none, 0, min(extent_or_none.slots, count - len(offsets)), offsets)
        while len(offsets) < count and runs:
            length, _, start, extent = runs.pop()
            self._use(size_class, extent, -start, min(length, count - len(offsets)), offsets)

    def _grow(self, size_class: _SizeClass) -> Extent | None:
        """A new extent from the common stock: of the usual size, or of as many slots as the longest run holds."""
        stride, granules = size_class.stride, size_class.granules
        first = self._stock.take(granules)
        if first is None:
            if not self._stock.may_hold(-(-stride // self.granule_bytes)):
                return None
            slots = self._stock.largest() * self.granule_bytes // stride
            if not slots:
                return None
            granules = -(-slots * stride // self.granule_bytes)
            first = self._stock.take(granules)
            if first is None:
                raise PoolError(f"the longest free run does not hold the {granules} granules it should")
        slots = granules * self.granule_bytes // stride
        extent = Extent(first, granules, first * self.granule_bytes, stride, slots)
        insort(self._extents, extent, key=_FIRST)
        size_class.extents += 1
        size_class.partial[extent] = None
        return extent

    def _use(self, size_class: _SizeClass, extent: Extent, start: int, count: int, offsets: list[int]) -> None:
        extent.free &= ~(((1 << count) - 1) << start)
        if not extent.free:
            del size_class.partial[extent]
        first = extent.base + start * extent.stride
        taken = range(first, first + count * extent.stride, extent.stride)
        for offset in taken:
            self._at[offset] = extent
        offsets.extend(taken)
        self.used_bytes += count * extent.stride


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1

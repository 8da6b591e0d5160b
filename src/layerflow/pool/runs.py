"""Free runs of granules: the arena's common stock, from which size classes take their extents."""

from __future__ import annotations

from bisect import bisect_left, insort

from layerflow.errors import PoolError


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

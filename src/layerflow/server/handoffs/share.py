"""How the share of the arena that hand-offs may keep is divided among the keys whose clients open them.

The hand-offs of one key may keep all of it while nobody else wants any. Then they make room: for this machine's
engines, and for another key up to an equal part. Whoever keeps most gives first: what is complete, then what is not.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from layerflow.pool.base import NewObject
from layerflow.server.handoffs.handoff import REMEMBERED, HandoffRecord, HandoffStatus


class PinnedObjects:
    """Objects that hand-offs keep. Each is counted once, however many hand-offs keep it.

    :ivar nbytes: size of all of them together.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._keepers: Counter[bytes] = Counter()
        self._sizes: dict[bytes, int] = {}  # as counted: an engine of another model may name an object of another size

    def __len__(self) -> int:
        return len(self._keepers)

    def add(self, objects: Mapping[bytes, NewObject]) -> None:
        """Count these for one more hand-off."""
        for key, new in objects.items():
            if key not in self._sizes:
                self._sizes[key] = new.nbytes
                self.nbytes += new.nbytes
        self._keepers.update(objects.keys())

    def discard(self, objects: Iterable[bytes]) -> None:
        """Stop counting these for one hand-off."""
        for key in objects:
            self._keepers[key] -= 1
            if not self._keepers[key]:
                del self._keepers[key]
                self.nbytes -= self._sizes.pop(key)

    def more(self, objects: Mapping[bytes, NewObject]) -> int:
        """Return how much would be kept in addition if these objects were."""
        return sum(new.nbytes for key, new in objects.items() if key not in self._keepers)


class _Part:
    """What the hand-offs of one key keep.

    :ivar kept: of all of them. :ivar unfinished: of those that are not complete.
    :ivar opened: these, oldest first.
    """

    def __init__(self) -> None:
        self.kept, self.unfinished = PinnedObjects(), PinnedObjects()
        self.opened: dict[HandoffRecord, None] = {}
        self._complete: list[tuple[bool, int, HandoffRecord]] = []  # and some that were

    def add_complete(self, handoff: HandoffRecord, live: int) -> None:
        """List a complete hand-off: it goes before those opened later, one that a reader has come for before others.

        :param live: how many hand-offs are not over.
        """
        if len(self._complete) > 2 * live + REMEMBERED:
            self._complete = [
                each for each in self._complete if each[2].status is HandoffStatus.COMPLETE and each[2] is not handoff
            ]
            heapq.heapify(self._complete)
        heapq.heappush(self._complete, (not handoff.claims, handoff.serial, handoff))

    def take_complete(self) -> HandoffRecord | None:
        """The complete one that goes first, listed no more; None = there is none."""
        while self._complete:
            unclaimed, _, found = heapq.heappop(self._complete)
            if found.status is HandoffStatus.COMPLETE and unclaimed == (not found.claims):
                return found
        return None


class HandoffShare:
    """All parts, each by the key of the clients whose hand-offs keep it; of this machine's, "". Sizes in bytes.

    :param room: what all hand-offs may keep together.

    :ivar kept: what they keep. :ivar unfinished: of it, what those keep that are not complete.
    """

    def __init__(self, room: Callable[[], float]) -> None:
        self.room = room
        self.kept, self.unfinished = PinnedObjects(), PinnedObjects()
        self._parts: dict[str, _Part] = {}  # of keys that keep something, or are about to
        self._lacking: Counter[str] = Counter()  # keys that room is made for

    # What is kept --------------------------------------------------------------------------------

    def begin(self, handoff: HandoffRecord) -> None:
        """A hand-off is being opened."""
        self._parts.setdefault(handoff.key, _Part()).opened[handoff] = None

    def add(self, handoff: HandoffRecord, objects: Mapping[bytes, NewObject]) -> None:
        """A hand-off that is being opened keeps these, too."""
        part = self._parts[handoff.key]
        for counted in (self.kept, self.unfinished, part.kept, part.unfinished):
            counted.add(objects)

    def completed(self, handoff: HandoffRecord, live: int) -> None:
        """A hand-off is complete, or the first reader has come for one that is; parameters as of the part's."""
        part = self._parts[handoff.key]
        part.opened.pop(handoff, None)
        part.add_complete(handoff, live)

    def finish(self, handoff: HandoffRecord, objects: Mapping[bytes, NewObject]) -> None:
        """Count some of what one that is, or was, complete keeps no more with what those keep that are not."""
        for counted in (self.unfinished, self._parts[handoff.key].unfinished):
            counted.discard(objects)

    def over(self, handoff: HandoffRecord) -> None:
        """A hand-off has ended; what it keeps is discarded next."""
        part = self._parts.get(handoff.key)
        if part is not None:
            part.opened.pop(handoff, None)
            self._forget_unused(handoff.key, part)

    def discard(self, handoff: HandoffRecord, objects: Mapping[bytes, NewObject], *, unfinished: bool) -> None:
        """These are kept no more for a hand-off.

        :param unfinished: it never was complete.
        """
        part = self._parts[handoff.key]
        for counted in (self.kept, part.kept):
            counted.discard(objects)
        if unfinished:
            self.finish(handoff, objects)
        self._forget_unused(handoff.key, part)

    def _forget_unused(self, key: str, part: _Part) -> None:
        if not (part.kept or part.opened):
            del self._parts[key]

    # Who may keep more ---------------------------------------------------------------------------

    def with_all(self, key: str, more: int) -> int:
        """What the hand-offs of a key keep with so much more."""
        return self._parts[key].kept.nbytes + more

    def more_of(self, key: str, objects: Mapping[bytes, NewObject]) -> int:
        """How much more the hand-offs of a key would keep with these objects."""
        return self._parts[key].kept.more(objects)

    def fits(self, key: str, objects: Mapping[bytes, NewObject]) -> bool:
        """May the hand-offs of a key keep these, too, while nobody makes room?"""
        if self.kept.nbytes + self.kept.more(objects) > self.room():
            return False
        # The room that is being made for one is not for those that make it.
        if not key or not self._lacking.keys() - {key}:
            return True
        return "" not in self._lacking and self.with_all(key, self.more_of(key, objects)) <= self._equal_part(key)

    def lacks(self, key: str) -> None:
        """One that is being opened needs room: who makes it takes none of it until as many lack no more."""
        self._lacking[key] += 1

    def lacks_no_more(self, key: str) -> None:
        """Take one of these back."""
        self._lacking[key] -= 1
        if not self._lacking[key]:
            del self._lacking[key]

    def moved(self, key: str, wanted: int) -> int:
        """What hand-offs keep that are not complete and make room for a key that is to keep `wanted` in all."""
        return sum(part.unfinished.nbytes for each, part in self._givers(key, wanted) if each)

    def next_to_go(self, key: str, wanted: int) -> HandoffRecord | None:
        """Which hand-off makes room for a key that is to keep `wanted` in all; None = none does.

        Past what others give it, its own complete ones go. Those of this machine's engines that are not complete stay.
        """
        if key and "" in self._lacking:
            return None  # whatever goes is for this machine's engines: nothing of this key would fit
        givers = sorted(self._givers(key, wanted), key=lambda giver: giver[1].kept.nbytes, reverse=True)
        for each, part in givers:
            found = part.take_complete()
            if found is None and each:
                found = next(reversed(part.opened), None)  # the last: least of it has been computed
            if found is not None:
                return found
        own = self._parts.get(key)
        return own.take_complete() if own is not None else None

    def _givers(self, key: str, wanted: int) -> Iterator[tuple[str, _Part]]:
        """Whose hand-offs make room for a key that is to keep `wanted` in all."""
        equal = self._equal_part(key)
        for each, part in self._parts.items():
            if each != key and (not key or (wanted <= equal and part.kept.nbytes > equal)):
                yield each, part

    def _equal_part(self, key: str) -> float:
        return self.room() / len({key, *self._parts})

"""How the share of the arena that leases may pin is divided among keys: those of peers, and those of hits.

The clients of one key may lease all of it while nobody else wants any. Past an equal part they are lent nothing more
while another key wants some, and their leases end for it: those first that were never renewed, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Part:
    """What the leases of one principal pin.

    :param nbytes: of all of them. :param leaving: of those that were withdrawn and may still be read.
    :param unread: sizes of those that are lent and were not renewed, by number, oldest first.
    :param read: of those that were.
    """

    nbytes: int = 0
    leaving: int = 0
    unread: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)

    @property
    def staying(self) -> int:
        """Bytes that no withdrawal gives back."""
        return self.nbytes - self.leaving


class LeaseShare:
    """All parts. Sizes in bytes; `now` and `until` in monotonic seconds.

    :param room: what all leases may pin together.

    :ivar nbytes: what they pin.
    """

    def __init__(self, room: Callable[[], float]) -> None:
        self._room = room
        self._parts: dict[str, _Part] = {}  # of those that pin something
        self._wants: dict[str, float] = {}  # who was refused within its part, until when that counts
        self.nbytes = 0

    # What is pinned ------------------------------------------------------------------------------

    def pin(self, principal: str, nbytes: int) -> None:
        """A lease that is being made pins more."""
        self._parts.setdefault(principal, _Part()).nbytes += nbytes
        self.nbytes += nbytes

    def lend(self, principal: str, lease: int, nbytes: int) -> None:
        """A lease is lent that pins so much, or as much by now."""
        if nbytes:  # else its end makes no room
            self._parts[principal].unread[lease] = nbytes

    def renew(self, principal: str, lease: int) -> None:
        """A lease was renewed: its reader reads it."""
        part = self._parts.get(principal)
        if part is not None and lease in part.unread:
            part.read[lease] = part.unread.pop(lease)

    def withdraw(self, principal: str, lease: int) -> None:
        """A lease has ended; what it pins is given back once nothing of it is read."""
        part = self._parts.get(principal)
        if part is not None:
            part.leaving += part.unread.pop(lease, 0) or part.read.pop(lease, 0)

    def free(self, principal: str, nbytes: int, *, withdrawn: bool) -> None:
        """A lease, which was lent and then withdrawn or never was lent, pins so much no more."""
        part = self._parts.get(principal)
        if part is not None:
            self.nbytes -= nbytes
            part.nbytes -= nbytes
            part.leaving -= nbytes if withdrawn else 0
            if not part.nbytes:
                del self._parts[principal]

    @property
    def room_left(self) -> float:
        """What nothing pins."""
        return self._room() - self.nbytes

    @property
    def leaving(self) -> int:
        """What withdrawn leases pin, until nothing of them is read."""
        return sum(part.leaving for part in self._parts.values())

    # Who may pin more ----------------------------------------------------------------------------

    def left(self, principal: str, now: float) -> float:
        """What the leases of a principal may pin in addition."""
        return min(self.room_left, self._part_left(principal)) if self._others_want(principal, now) else self.room_left

    def is_held(self, principal: str, now: float) -> bool:
        """Do others want some, where the leases of a principal pin an equal part already?"""
        return self._others_want(principal, now) and self._part_left(principal) <= 0

    def _others_want(self, principal: str, now: float) -> bool:
        self._wants = {each: until for each, until in self._wants.items() if until > now}
        return bool(self._wants.keys() - {principal})

    def want(self, principal: str, sizes: Iterable[int], until: float) -> int:
        """A principal wants objects of these sizes, and nothing is left for them.

        :param until: others are held to their parts so long.
        :returns: the size of those that are within its part, and are to be made room for.
        """
        wanted, most = 0, self._part_left(principal)
        for nbytes in sizes:
            wanted += nbytes if wanted + nbytes <= most else 0
        if wanted:
            self._wants[principal] = until
        else:
            self.content(principal)
        return wanted

    def content(self, principal: str) -> None:
        """A principal has got what it wanted, or its part."""
        self._wants.pop(principal, None)

    def next_to_end(self, principal: str, wanted: int) -> int | None:
        """Which lease ends so that a principal can pin `wanted` more; None = enough is given back, or on its way.

        It is one of whoever has most, and more than an equal part.
        """
        if self.room_left + self.leaving >= wanted:
            return None
        most = self._equal_part(principal)
        over = [part for each, part in self._parts.items() if each != principal and part.staying > most]
        found = max((part for part in over if part.unread or part.read), key=lambda part: part.staying, default=None)
        return None if found is None else next(iter(found.unread or found.read))

    def _part_left(self, principal: str) -> float:
        part = self._parts.get(principal)
        return self._equal_part(principal) - (part.nbytes if part is not None else 0)

    def _equal_part(self, principal: str) -> float:
        return self._room() / len({principal, *self._parts, *self._wants})

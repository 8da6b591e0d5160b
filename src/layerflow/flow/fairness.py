"""Who is next between sessions: deficit round-robin over bytes.

Each visit adds a quantum of bytes to a session's credit and each grant takes its bytes from it, so
that sessions with work share the link evenly whatever their batch sizes, at O(1) a grant.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from layerflow.flow.events import Direction, Hop


class Queued(Protocol):
    """Who shares a link: sessions, and the sources of what a host moves. See :class:`Ring`."""

    credit: list[int]
    queued: list[bool]


Q = TypeVar("Q", bound=Queued)


class Ring(Generic[Q]):
    """The sessions that may have permitted work in one direction; whose turn it is comes first in `queue`."""

    __slots__ = ("_direction", "queue")

    def __init__(self, direction: Direction | Hop) -> None:
        self._direction = direction
        self.queue: deque[Q] = deque()

    def join(self, session: Q) -> None:
        """The session may have permitted work; it queues behind the others, once."""
        if not session.queued[self._direction]:
            session.queued[self._direction] = True
            session.credit[self._direction] = 0
            self.queue.append(session)

    def leave(self, session: Q) -> None:
        """The session has no permitted work; unused credit is lost."""
        if session.queued[self._direction]:
            session.queued[self._direction] = False
            self.queue.remove(session)

    def turn(self, session: Q, nbytes: int, quantum: int) -> bool:
        """Whether the first session's credit covers `nbytes` (at most `quantum`); if not, its turn is over."""
        if len(self.queue) == 1 or session.credit[self._direction] >= nbytes:
            return True
        session.credit[self._direction] += quantum
        self.queue.rotate(-1)
        return False

    def charge(self, session: Q, nbytes: int) -> None:
        """The session took `nbytes`; alone in the ring it takes them for nothing."""
        if len(self.queue) > 1:
            session.credit[self._direction] -= nbytes

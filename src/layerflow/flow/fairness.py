"""Who is next between sessions: deficit round-robin over bytes.

Each visit adds a quantum of bytes to a session's credit and each grant takes its bytes from it, so
that sessions with work share the link evenly whatever their batch sizes, at O(1) a grant.
"""

from __future__ import annotations

from collections import deque

from layerflow.flow.events import Direction
from layerflow.flow.sessions import Session


class Ring:
    """The sessions that may have permitted work in one direction; whose turn it is comes first in `queue`."""

    __slots__ = ("_direction", "queue")

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self.queue: deque[Session] = deque()

    def join(self, session: Session) -> None:
        """The session may have permitted work; it queues behind the others, once."""
        if not session.queued[self._direction]:
            session.queued[self._direction] = True
            session.credit[self._direction] = 0
            self.queue.append(session)

    def leave(self, session: Session) -> None:
        """The session has no permitted work; unused credit is lost."""
        if session.queued[self._direction]:
            session.queued[self._direction] = False
            self.queue.remove(session)

    def turn(self, session: Session, nbytes: int, quantum: int) -> bool:
        """Whether the first session's credit covers `nbytes` (at most `quantum`); if not, its turn is over."""
        if len(self.queue) == 1 or session.credit[self._direction] >= nbytes:
            return True
        session.credit[self._direction] += quantum
        self.queue.rotate(-1)
        return False

    def charge(self, session: Session, nbytes: int) -> None:
        """The session took `nbytes`; alone in the ring it takes them for nothing."""
        if len(self.queue) > 1:
            session.credit[self._direction] -= nbytes

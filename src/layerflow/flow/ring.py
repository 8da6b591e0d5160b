"""Taking turns on a link: deficit round robin over bytes."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from layerflow.flow.events import Direction
from layerflow.flow.graph.session import Session
from layerflow.flow.host_events import Hop


class Queued(Protocol):
    """Who shares a link: sessions, and the sources of what a host moves. See :class:`Ring`."""

    credit: list[int]
    queued: list[bool]


Q = TypeVar("Q", bound=Queued)


class Ring(Generic[Q]):
    """Who may have permitted work, in one direction or on one hop; whose turn it is comes first in `queue`."""

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


class SessionRing(Ring[Session]):
    """Sessions in turn. Those for whose batches, which cannot move yet, there is no room are parked beside it."""

    __slots__ = ("_parked",)

    def __init__(self, direction: Direction) -> None:
        super().__init__(direction)
        self._parked: dict[Session, None] = {}

    def leave(self, session: Session) -> None:
        """The session has no permitted work; unused credit is lost."""
        self._parked.pop(session, None)
        super().leave(session)

    def park(self, session: Session) -> None:
        """The session leaves, and comes back when there is room for batches that cannot move yet."""
        self.leave(session)
        self._parked[session] = None

    def join_parked(self) -> None:
        """There is such room now."""
        for session in self._parked:
            if session.pending[self._direction]:
                self.join(session)
        self._parked.clear()

"""Taking turns on a link: deficit round robin over bytes."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from layerflow.flow.budget import Budget
from layerflow.flow.events import Direction, Hop
from layerflow.flow.graph import Session


class Queued(Protocol):
    """One that shares a link: a session, or an engine that a host moves objects for. See :class:`Ring`."""

    credit: list[int]
    queued: list[bool]


Q = TypeVar("Q", bound=Queued)


class Ring(Generic[Q]):
    """Those that may have permitted work, in one direction or on one hop; whose turn it is comes first in `queue`."""

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
    """Sessions in turn, and beside the ring those whose next batch cannot move yet and has no room.

    Where all gated batches together leave no room, sessions stand in line: the first of the line comes back as soon as
    its batch fits, and no other session is granted a gated batch before it. A session whose own share is used up comes
    back, or stands in line, once some of its own gated batches can move. So an event tries the sessions that it
    concerns and the first of the line, however many wait.
    """

    __slots__ = ("direction", "line", "over_share")

    def __init__(self, direction: Direction) -> None:
        super().__init__(direction)
        self.direction = direction
        self.line: dict[Session, int] = {}  #: bytes of the batch that each waits with, longest waiting first
        self.over_share: dict[Session, int] = {}  #: the same, in no order

    def leave(self, session: Session) -> None:
        """The session has no permitted work; unused credit is lost."""
        self.line.pop(session, None)
        self.over_share.pop(session, None)
        super().leave(session)

    def may_gate(self, session: Session) -> bool:
        """Whether no other session waits longer for room for gated batches."""
        return not self.line or next(iter(self.line)) is session

    def waits(self, session: Session) -> bool:
        """Whether the session waits for room for a gated batch."""
        return session in self.line or session in self.over_share

    def park(self, session: Session, nbytes: int, budget: Budget) -> None:
        """The session leaves the ring.

        :param nbytes: of the gated batch for which there is no room; 0 = it has none, and waits for nothing.
        """
        super().leave(session)
        if nbytes and budget.within_share(session, self.direction, nbytes):
            self.over_share.pop(session, None)
            self.line[session] = nbytes  # whoever stands in line already keeps the place
            return
        self.line.pop(session, None)
        if nbytes:
            self.over_share[session] = nbytes
        else:
            self.over_share.pop(session, None)

    def wake(self, budget: Budget) -> None:
        """Sessions that are within their share again stand in line."""
        over = self.over_share
        for session in list(over) if budget.regrown else [session for session in budget.ungated if session in over]:
            nbytes = over[session]
            if budget.within_share(session, self.direction, nbytes):
                del over[session]
                self.line[session] = nbytes

    def admit(self, budget: Budget) -> None:
        """The first of the line, which is not empty, comes back where its batch fits."""
        session, nbytes = next(iter(self.line.items()))
        if budget.has_gated_room(self.direction, nbytes):
            self.join(session)

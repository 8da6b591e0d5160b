"""Everything the core remembers, and how it finds it again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from layerflow.errors import InvalidTransition
from layerflow.flow.budget import Budget
from layerflow.flow.deadlines import Deadlines
from layerflow.flow.events import Direction, Event, Hop, Limits
from layerflow.flow.fairness import Ring
from layerflow.flow.hosts import HostLane
from layerflow.flow.sessions import Session
from layerflow.flow.statistics import Counters
from layerflow.flow.steps import Flight, Leg, Step, Strand


class State:
    """The core's memory: O(steps' parts + objects on their way + batches in flight)."""

    __slots__ = (
        "budget",
        "counters",
        "deadlines",
        "flights",
        "lanes",
        "loosened",
        "newest_session",
        "next_batch",
        "paused",
        "rings",
        "sessions",
        "telling",
        "unsettled",
        "wake",
    )

    def __init__(self, limits: Limits) -> None:
        self.budget = Budget(limits)
        self.rings: tuple[Ring[Session], Ring[Session]] = (Ring(Direction.LOAD), Ring(Direction.SAVE))
        self.lanes = (HostLane(Hop.FETCH), HostLane(Hop.WRITE))
        self.deadlines = Deadlines()
        self.counters = Counters()
        self.sessions: dict[int, Session] = {}
        self.flights: dict[int, Flight] = {}
        self.telling: list[Strand] = []
        self.unsettled: list[Step] = []
        self.loosened: list[Leg] = []
        self.next_batch = 1
        self.paused = False
        self.newest_session = -1
        self.wake = math.inf

    def session(self, number: int) -> Session | None:
        """A live session; None = lost, its reports are late.

        :raises InvalidTransition: for a session that was never opened.
        """
        session = self.sessions.get(number)
        if session is None:
            if number > self.newest_session:
                raise InvalidTransition(f"session {number} was never opened; send SessionOpened first")
            self.counters.late_reports += 1
        return session

    def step(self, event: Event, session_number: int, number: int) -> Step | None:
        """A live step, with `event` added to its story; None = finished or never opened, the event is late."""
        session = self.session(session_number)
        if session is None:
            return None
        step = session.steps.get(number)
        if step is None:
            self.counters.late_reports += 1
            return None
        step.story.append(event)
        return step

    def carve_later(self, leg: Leg) -> None:
        """The leg has something to be carved: keep it, and queue its session unless all of it waits."""
        session = leg.step.session
        session.carving[leg.direction][leg.step.number] = leg
        if leg.head() is not None:
            self.rings[leg.direction].join(session)

    def save_later(self, session: Session) -> None:
        """More saves of the session may be permitted now."""
        if session.carving[Direction.SAVE]:
            self.rings[Direction.SAVE].join(session)

    def call_back(self, strands: Iterable[Strand]) -> None:
        """Their batches in flight are only awaited: nobody else waits for the room they took."""
        for strand in strands:
            for flight in strand.flights.values():
                self.budget.excuse(flight)
            if strand.leg.direction is Direction.SAVE:
                self.save_later(strand.leg.step.session)

    def carved_out(self, leg: Leg) -> None:
        """Nothing is left to be carved of the leg."""
        leg.step.session.carving[leg.direction].pop(leg.step.number, None)

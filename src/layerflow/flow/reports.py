"""What the lanes report: batches that ended, layers that have come, sessions that are gone."""

from __future__ import annotations

from layerflow.errors import InvalidTransition
from layerflow.flow import completion as deaths
from layerflow.flow.commands import Command, LoadsDone, Revoke
from layerflow.flow.completion import forget, quieted
from layerflow.flow.events import BatchDone, BatchFailed, Direction
from layerflow.flow.graph import Flight, Leg
from layerflow.flow.sessions import Session
from layerflow.flow.state import State


def batch_done(state: State, event: BatchDone, out: list[Command]) -> None:
    """Its bytes are in place."""
    flight = _land(state, event)
    if flight is None:
        return
    leg = flight.strand.leg
    leg.moved += flight.nbytes
    if leg.direction is Direction.LOAD:
        state.counters.loaded_bytes += flight.nbytes
    else:
        state.counters.saved_bytes += flight.nbytes
    _landed(state, flight, out)


def batch_failed(state: State, event: BatchFailed, out: list[Command]) -> None:
    """Its bytes are not all in place: the parts it carried fail, and nobody else's."""
    flight = _land(state, event)
    if flight is None:
        return
    strand = flight.strand
    state.counters.batches_failed += 1
    if strand.leg.direction is Direction.LOAD:
        deaths.fail_load_range(state, strand, (flight.lo, flight.hi), event.reason, out)
    else:
        hit = strand.overlapping(flight.lo, flight.hi)
        deaths.kill_saves(state, strand.leg.step, hit, event.reason, out)
    _landed(state, flight, out)


def _land(state: State, event: BatchDone | BatchFailed) -> Flight | None:
    """Take a batch out of flight; None = it is long gone.

    :raises InvalidTransition: for a batch that was never granted, or not to this session.
    """
    flight = state.flights.get(event.batch)
    if flight is None:
        if state.session(event.session) is None:
            return None
        if not 0 < event.batch < state.next_batch:
            raise InvalidTransition(f"session {event.session} reported batch {event.batch}, which was never granted")
        state.counters.late_reports += 1
        return None
    strand = flight.strand
    leg = strand.leg
    step = leg.step
    if step.session.number != event.session:
        raise InvalidTransition(
            f"session {event.session} reported batch {event.batch}, which session {step.session.number} has "
            f"for step {step.number}",
            step.told(),
        )
    step.story.append(event)
    del state.flights[event.batch]
    del strand.flights[event.batch]
    leg.flying -= 1
    state.budget.give(flight)
    if leg.direction is Direction.SAVE:
        if leg.tell:
            state.telling.append(strand)
        step.session.unsaved -= flight.nbytes
    return flight


def _landed(state: State, flight: Flight, out: list[Command]) -> None:
    strand = flight.strand
    for quiet in flight.watch or ():
        quiet.pending -= 1
        if not quiet.pending:
            quieted(state, strand.leg.step.session, quiet, out)
    if not strand.flights and not strand.carving:
        state.unsettled.append(strand.leg.step)


def lose_session(state: State, session: Session, out: list[Command]) -> None:
    """Nobody is left who could touch its memory or write its objects: all that is unfinished goes back at once."""
    del state.sessions[session.number]
    state.budget.sessions -= 1
    state.budget.freed = True
    for ring in state.rings:
        ring.leave(session)
    state.counters.sessions_lost += 1
    for step in list(session.steps.values()):
        for leg in (step.loads, step.saves):
            if leg is not None:
                _ground(state, leg)
        if step.saves is not None and step.saves.open:
            unfinished = [
                position
                for strand in step.saves.strands.values()
                for position in strand.members
                if position not in step.saves.revoked and not (strand.committed and position not in step.saves.dead)
            ]
            state.counters.revoked_parts += len(unfinished)
            out.append(Revoke(session.number, step.number, tuple(sorted(unfinished)), "the session was lost"))
        if step.loads is not None and not step.loads.done:
            step.loads.done = True
            state.loosened.append(step.loads)
            out.append(LoadsDone(session.number, step.number))
        forget(state, step, out)


def _ground(state: State, leg: Leg) -> None:
    for strand in leg.strands.values():
        for number, flight in strand.flights.items():
            del state.flights[number]
            state.budget.give(flight)

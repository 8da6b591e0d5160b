"""What the lanes report: batches that ended, layers that have come, sessions that are gone."""

from __future__ import annotations

from layerflow.errors import InvalidTransition
from layerflow.flow import completion as deaths
from layerflow.flow.commands import Command, LoadsDone, Revoke
from layerflow.flow.completion import forget, quieted
from layerflow.flow.cursor import Span
from layerflow.flow.events import BatchDone, BatchFailed, Direction, FetchFailed, LayersFetched
from layerflow.flow.graph import Flight, Leg, Step, Strand
from layerflow.flow.sessions import Session
from layerflow.flow.state import State


def lay_out(strand: Strand) -> None:
    """One cohort for the parts that are in the arena, and one for each arrival."""
    cohorts: dict[int, list[Span]] = {}
    for member, position in enumerate(strand.members):
        lo, hi = strand.starts[member], strand.starts[member + 1]
        spans = cohorts.setdefault(strand.leg.parts[position].fetch, [])
        if spans and spans[-1][1] == lo:
            spans[-1] = (spans[-1][0], hi)
        else:
            spans.append((lo, hi))
    for fetch, spans in cohorts.items():
        strand.add_cohort(spans, fetch)


def layers_fetched(state: State, step: Step, event: LayersFetched) -> None:
    """Layers are in the arena that may be carved now.

    :raises InvalidTransition: for an arrival or layers that the step does not have.
    """
    strand = step.loads.strands.get(event.group) if step.loads is not None else None
    known = strand.arrivals.get(event.fetch) if strand is not None else None
    if strand is None or known is None:
        raise step.impossible(f"fetched layers of arrival {event.fetch}, group {event.group}, which it does not have")
    layers = len(strand.shape.layers)
    if not 0 <= event.layers <= layers:
        raise step.impossible(f"fetched {event.layers} layers of group {event.group}, which has {layers}")
    cohort = strand.arriving(event.fetch)
    if cohort is None or event.layers <= known:
        state.counters.late_reports += 1
        return
    strand.arrivals[event.fetch] = event.layers
    cohort.permit(event.layers)
    if cohort.fresh:
        strand.merge(cohort)
    state.carve_later(strand.leg)


def fetch_failed(state: State, step: Step, event: FetchFailed, out: list[Command]) -> None:
    """The objects of these parts will never all be in the arena: what is left of the parts fails whole.

    :raises InvalidTransition: for a part that the step does not have, or whose objects are all there.
    """
    leg = step.loads
    fresh: set[int] = set()
    for position in event.parts:
        if leg is None or not 0 <= position < len(leg.parts):
            raise step.impossible(f"lost the objects of load part {position}, which it does not have")
        if position in leg.dead:
            continue
        strand = leg.strand_of(position)
        if strand.arrivals.get(leg.parts[position].fetch, len(strand.shape.layers)) == len(strand.shape.layers):
            raise step.impossible(f"lost the objects of load part {position} after all of them had arrived")
        fresh.add(position)
    if leg is None or not fresh:
        state.counters.late_reports += 1
        return
    deaths.fail_loads(state, leg, sorted(fresh), event.reason, out)
    state.unsettled.append(step)


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
            out.append(LoadsDone(session.number, step.number))
        forget(state, step, out)


def _ground(state: State, leg: Leg) -> None:
    for strand in leg.strands.values():
        for number, flight in strand.flights.items():
            del state.flights[number]
            state.budget.give(flight)

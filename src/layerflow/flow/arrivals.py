"""Loads whose objects are still on their way into the arena, layer by layer.

The parts of a group that share an arrival are one cohort, which is carved as far as its layers are there.
"""

from __future__ import annotations

from layerflow.flow import deaths
from layerflow.flow.commands import Command
from layerflow.flow.events import FetchFailed, LayersFetched
from layerflow.flow.spans import Span
from layerflow.flow.state import State
from layerflow.flow.steps import Step, Strand


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

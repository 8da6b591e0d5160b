"""Parts that die: failed, fenced, expired or aborted.

A dead part is carved no further. What became of it is told at once where the engine must know (failed
loads), and once its last batch in flight has ended where memory is given back (revoked saves).
"""

from __future__ import annotations

from collections.abc import Iterable

from layerflow.flow.commands import Cancel, Command, LoadFailed
from layerflow.flow.events import Direction
from layerflow.flow.quiet import Quiet
from layerflow.flow.settle import quieted, release_held, seal_rest
from layerflow.flow.spans import Span, joined, touches, without
from layerflow.flow.state import State
from layerflow.flow.steps import Leg, Step, Strand


def bury(state: State, leg: Leg, positions: Iterable[int]) -> list[int]:
    """Carve these parts no further. Returns those that were alive until now."""
    fresh = [
        position
        for position in positions
        if position not in leg.dead and not (leg.direction is Direction.SAVE and leg.strand_of(position).committed)
    ]
    leg.dead.update(fresh)
    for position in fresh:
        leg.strand_of(position).live -= 1
    if leg.cohorts and fresh:
        for strand, holes in leg.spans_of(fresh):
            _uncarve(leg, strand, holes)
    if not leg.cohorts:
        state.carved_out(leg)
    if leg.direction is Direction.SAVE:
        state.save_later(leg.step.session)
        if leg.tell:
            state.telling += leg.strands.values()
    return fresh


def _uncarve(leg: Leg, strand: Strand, holes: list[Span]) -> None:
    for cohort in strand.cohorts():
        freed = cohort.drop(holes)
        if leg.direction is Direction.SAVE:
            leg.step.session.unsaved -= freed
        if cohort.exhausted:
            strand.remove(cohort)
    for cohort in strand.cohorts():
        if cohort in leg.cohorts and cohort.fresh:
            strand.merge(cohort)


def kill_saves(state: State, step: Step, positions: Iterable[int], reason: str, out: list[Command]) -> None:
    """These save parts will never be published; they are revoked once no batch touches them."""
    leg = step.saves
    if leg is None or not leg.open:
        return
    fresh = bury(state, leg, positions)
    if not fresh:
        return
    seal_rest(leg, out)
    quiet = Quiet(revoke=(step, tuple(sorted(fresh)), reason))
    quiet.watch(leg.spans_of(fresh))
    if not quiet.pending:
        quieted(state, step.session, quiet, out)


def spoil_saves(state: State, step: Step, load_positions: Iterable[int], reason: str, out: list[Command]) -> None:
    """A request whose load failed computes garbage: what it saves must not be published.

    Later steps that are open already build on it, so this concerns every open step of the session.
    """
    if step.loads is None:
        return
    requests = {step.loads.parts[position].request for position in load_positions}
    if not requests:
        return
    for other in step.session.steps.values():
        if other.saves is not None and other.saves.open:
            kill_saves(state, other, other.saves.positions_of(requests), f"its load failed: {reason}", out)


def fail_loads(state: State, leg: Leg, positions: Iterable[int], reason: str, out: list[Command]) -> None:
    """These load parts will not arrive: report each whole (less what was reported before), carve no further."""
    fresh = bury(state, leg, positions)
    for position in fresh:
        lo, hi = leg.strand_of(position).span(position)
        _report(state, leg, position, (lo, hi), reason, out)
        leg.failed.pop(position, None)
    if fresh:
        spoil_saves(state, leg.step, fresh, reason, out)
        seal_rest(leg, out)


def _report(state: State, leg: Leg, position: int, span: Span, reason: str, out: list[Command]) -> None:
    known = leg.failed.get(position, [])
    part, step = leg.parts[position], leg.step
    if not known:
        state.counters.failed_parts += 1
    for lo, hi in without([span], known):
        out.append(LoadFailed(step.session.number, step.number, part.request, part.group, lo, hi, reason))
    leg.failed[position] = joined([*known, span])


def fail_load_range(state: State, strand: Strand, span: Span, reason: str, out: list[Command]) -> None:
    """A load batch failed.

    A part that had more to come dies whole: its later layers stay behind. A part whose last layer is
    already carved loses exactly the failed blocks; the rest of it still arrives.
    """
    leg = strand.leg
    coming = sorted(span for cohort in strand.cohorts() for span in cohort.spans)
    dying: list[int] = []
    hurt: list[int] = []
    for position in strand.overlapping(*span):
        if position not in leg.dead:
            (dying if touches(coming, *strand.span(position)) else hurt).append(position)
    for position in hurt:
        lo, hi = strand.span(position)
        _report(state, leg, position, (max(lo, span[0]), min(hi, span[1])), reason, out)
    spoil_saves(state, leg.step, hurt, reason, out)
    fail_loads(state, leg, dying, reason, out)


def fail_blocks(state: State, strand: Strand, spans: list[Span], reason: str, out: list[Command]) -> None:
    """The objects of these blocks will not come: exactly they fail, and are carved no further."""
    leg = strand.leg
    hurt: list[int] = []
    for span in spans:
        for position in strand.overlapping(*span):
            if position not in leg.dead:
                lo, hi = strand.span(position)
                _report(state, leg, position, (max(lo, span[0]), min(hi, span[1])), reason, out)
                hurt.append(position)
    _uncarve(leg, strand, spans)
    if not leg.cohorts:
        state.carved_out(leg)
    spoil_saves(state, leg.step, hurt, reason, out)
    seal_rest(leg, out)
    state.unsettled.append(leg.step)


def fence_loads(state: State, leg: Leg, reason: str, out: list[Command], *, cancel: bool) -> None:
    """Every load part with anything outstanding fails; what is in flight is awaited."""
    leg.cancelled = True
    outstanding: set[int] = set()
    for strand in leg.strands.values():
        ranges = [span for cohort in strand.cohorts() for span in cohort.spans]
        ranges += [(flight.lo, flight.hi) for flight in strand.flights.values()]
        for lo, hi in joined(ranges):
            outstanding.update(strand.overlapping(lo, hi))
    fail_loads(state, leg, sorted(outstanding), reason, out)
    state.call_back(leg.strands.values())
    release_held(state, leg.step)
    if cancel:
        out.append(Cancel(leg.step.session.number, leg.step.number, Direction.LOAD, reason))
    state.unsettled.append(leg.step)


def cut_saves(state: State, leg: Leg, reason: str, out: list[Command]) -> None:
    """Every save part that is not committed dies, and whatever waits for compute is called back."""
    leg.cancelled = True
    out.append(Cancel(leg.step.session.number, leg.step.number, Direction.SAVE, reason))
    kill_saves(state, leg.step, range(len(leg.parts)), reason, out)
    state.call_back(leg.strands.values())


def cut_uncomputed(state: State, leg: Leg, reason: str, out: list[Command]) -> None:
    """The layers that are not computed never will be: parts that lack one of them die."""
    step = leg.step
    lost = [
        strand for strand in leg.strands.values() if not strand.committed and strand.shape.layers[-1] >= step.computed
    ]
    if len(lost) == len(leg.strands):
        leg.cancelled = True
    if any(flight.layer >= step.computed for strand in lost for flight in strand.flights.values()):
        out.append(Cancel(step.session.number, step.number, Direction.SAVE, reason))
    kill_saves(state, step, sorted(position for strand in lost for position in strand.members), reason, out)
    state.call_back(lost)


def abort(state: State, steps: Iterable[Step], request: str, out: list[Command]) -> Quiet:
    """The request's parts die in every step. Returns what waits for the batches that still touch them."""
    quiet = Quiet(release=request)
    for step in steps:
        if step.loads is not None and (loads := step.loads.positions_of((request,))):
            bury(state, step.loads, loads)
            seal_rest(step.loads, out)
            quiet.watch(step.loads.spans_of(loads))
            state.unsettled.append(step)
        if step.saves is not None and (saves := step.saves.positions_of((request,))):
            kill_saves(state, step, saves, "the request was aborted", out)
            quiet.watch(step.saves.spans_of(saves))
    return quiet

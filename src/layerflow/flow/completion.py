"""What follows when something of a step has ended or was cancelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerflow.flow.commands import (
    Cancel,
    Command,
    Commit,
    LayersStored,
    LoadFailed,
    LoadsDone,
    Release,
    Revoke,
    Seal,
    StepDone,
)
from layerflow.flow.cursor import Span, joined, touches, without
from layerflow.flow.events import Direction
from layerflow.flow.graph import Leg, Quiet, Step, Strand
from layerflow.flow.sessions import Session
from layerflow.flow.state import State


def settle(state: State, step: Step, out: list[Command]) -> None:
    """Say what has become true of the step, and forget it when nothing is left.

    A commit waits for the step's loads, and for those of earlier steps for the same requests: a request
    whose load fails late has computed garbage.
    """
    if step.session.steps.get(step.number) is not step:
        return
    loads, saves = step.loads, step.saves
    if loads is not None and not loads.done and loads.idle:
        loads.done = True
        state.loosened.append(loads)
        out.append(LoadsDone(step.session.number, step.number))
        release_held(state, step)
    if saves is not None and saves.open and (loads is None or loads.done):
        _commit(state, saves, out)
    if step.closed and (loads is None or loads.done) and (saves is None or not (saves.open or saves.flying)):
        forget(state, step, out)
    else:
        state.deadlines.set(step, step.next_alarm())


def tell_stored(state: State, out: list[Command]) -> None:
    """Say of which layers more is stored now: before the commit that follows from the last of them."""
    for strand in state.telling:
        stored, step = strand.stored(), strand.leg.step
        if strand.live and stored > strand.told:
            strand.told = stored
            out.append(LayersStored(step.session.number, step.number, strand.shape.group, stored))
    state.telling.clear()


def _commit(state: State, saves: Leg, out: list[Command]) -> None:
    ready = [s for s in saves.strands.values() if not (s.committed or s.carving or s.flights)]
    saves.held = bool(ready) and builds_on_loads(saves, ready)
    if saves.held:
        return
    parts: list[int] = []
    for strand in ready:
        strand.committed = True
        parts += [part for part in strand.members if part not in saves.dead] if saves.dead else strand.members
    if parts:
        saves.open -= len(parts)
        state.counters.committed_parts += len(parts)
        out.append(Commit(saves.step.session.number, saves.step.number, tuple(sorted(parts))))


def builds_on_loads(saves: Leg, strands: Iterable[Strand]) -> bool:
    """Whether an earlier step still loads for a request that these strands save. Costs O(their parts)."""
    requests: set[str] | None = None
    for step in saves.step.session.steps.values():
        if step is saves.step:
            break
        if step.loads is not None and step.loads.undecided:
            if requests is None:
                live = (part for strand in strands for part in strand.members if part not in saves.dead)
                requests = {saves.parts[part].request for part in live}
            if not requests.isdisjoint(step.loads.requests()):
                return True
    return False


def release_held(state: State, step: Step) -> None:
    """The step's loads are decided: commits that waited for them are looked at again."""
    for other in step.session.steps.values():
        if other.saves is not None and other.saves.held:
            state.unsettled.append(other)


def forget(state: State, step: Step, out: list[Command]) -> None:
    """The step is over."""
    del step.session.steps[step.number]
    state.deadlines.set(step, float("inf"))
    state.counters.steps_done += 1
    loaded = step.loads.moved if step.loads is not None else 0
    saved = step.saves.moved if step.saves is not None else 0
    out.append(StepDone(step.session.number, step.number, loaded, saved))


def seal_rest(leg: Leg, out: list[Command]) -> None:
    """Seal the layers of which nothing is left to be carved because it died."""
    if leg.cancelled:
        return
    for strand in leg.strands.values():
        low = strand.low()
        for layer in strand.shape.layers[strand.sealed : low]:
            out.append(Seal(leg.step.session.number, leg.step.number, leg.direction, layer))
        strand.sealed = max(strand.sealed, low)


def revoke(state: State, step: Step, parts: Sequence[int], reason: str, out: list[Command]) -> None:
    """Give save parts back; nothing may write them any more."""
    saves = step.saves
    assert saves is not None
    saves.revoked.update(parts)
    saves.open -= len(parts)
    state.counters.revoked_parts += len(parts)
    state.unsettled.append(step)
    out.append(Revoke(step.session.number, step.number, tuple(parts), reason))


def quieted(state: State, session: Session, quiet: Quiet, out: list[Command]) -> None:
    """Every batch that was waited for has ended."""
    if quiet.revoke is not None:
        revoke(state, *quiet.revoke, out)
    if quiet.release is not None:
        session.aborting.pop(quiet.release, None)
        out.append(Release(session.number, quiet.release))


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
    state.permit(leg.step.session, leg.direction)
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

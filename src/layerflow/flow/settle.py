"""What follows when something of a step has ended: loads done, commit, revoke, release, step done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerflow.flow.commands import Command, Commit, LayersStored, LoadsDone, Release, Revoke, Seal, StepDone
from layerflow.flow.quiet import Quiet
from layerflow.flow.sessions import Session
from layerflow.flow.state import State
from layerflow.flow.steps import Leg, Step, Strand


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

"""Handing out batches: loads before saves, nearest layer first, fair between sessions, within the budget.

Work-conserving: it grants until no permitted batch is left or the next one does not fit. A batch that
does not fit is not overtaken, neither by a smaller one (a session of large batches would starve) nor
by saves (loads come first). A session whose next batch would be gated, and finds no room for such batches,
leaves the ring until there is some.

It may be paused after a few batches, so that loads can leave before the others are made out. Nobody waits for a save's
grant: with saves alone there is no pause.
"""

from __future__ import annotations

import sys

from layerflow.flow.commands import Command, Submit
from layerflow.flow.cursor import Cohort, Cut
from layerflow.flow.events import Direction
from layerflow.flow.graph import Flight
from layerflow.flow.sessions import Session
from layerflow.flow.state import State


def grant(state: State, out: list[Command], most: int) -> None:
    """Grant whatever may run now; with loads among it up to `most` batches, ``state.paused`` if there are more."""
    loads, saves = state.rings
    state.paused = False
    if state.budget.freed:
        state.budget.freed = False
        loads.join_parked()
        saves.join_parked()
    full = len(out) + most if loads.queue else sys.maxsize
    if loads.queue and not _grant(state, Direction.LOAD, out, full):
        return
    if saves.queue:
        _grant(state, Direction.SAVE, out, full)


def _grant(state: State, direction: Direction, out: list[Command], full: int) -> bool:
    """Grant in one direction; False when a batch is waiting: for room, or because `out` is `full`."""
    ring, budget = state.rings[direction], state.budget
    limits, max_bytes = budget.limits, budget.max_batch[direction]
    while ring.queue:
        session = ring.queue[0]
        cohort = session.next_cohort(direction, budget)
        if cohort is None:
            ring.park(session)
            continue
        cut = cohort.next_cut(limits.max_transfer_blocks, max_bytes)
        if not ring.turn(session, cut.nbytes, max_bytes):
            continue
        if not budget.fits(direction, cut.nbytes):
            return False
        if len(out) >= full:
            state.paused = True
            return False
        ring.charge(session, cut.nbytes)
        out.append(_submit(state, session, cohort, cut))
    return True


def _submit(state: State, session: Session, cohort: Cohort, cut: Cut) -> Submit:
    strand, layer = cohort.strand, cohort.layer
    leg = strand.leg
    direction, number = leg.direction, state.next_batch
    state.next_batch = number + 1
    seals = False
    if cohort.advance(cut):
        if cohort.exhausted:
            strand.remove(cohort)
            if not leg.cohorts:
                state.carved_out(leg)
        else:
            strand.merge(cohort)
        if strand.low() > strand.sealed:
            strand.sealed += 1
            seals = True
    depth = state.budget.limits.prefetch_layers
    gate = layer if direction is Direction.SAVE else layer - depth if depth else -1
    flight = Flight(number, strand, layer, cut.lo, cut.hi, cut.nbytes, gate)
    state.flights[number] = flight
    strand.flights[number] = flight
    leg.flying += 1
    state.budget.take(flight)
    state.counters.batches += 1
    return Submit(
        session.number,
        leg.step.number,
        number,
        direction,
        layer,
        cut.lo,
        cut.hi,
        cut.byte_lo,
        cut.byte_hi,
        cut.nbytes,
        gate,
        seals,
    )

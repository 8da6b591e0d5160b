"""Handing out batches: loads before saves, nearest layer first, fair between sessions, within the budget.

Work-conserving: it grants until no permitted batch is left or the next one does not fit. A batch that
does not fit is not overtaken, neither by a smaller one (a session of large batches would starve) nor
by saves (loads come first). Saves granted ahead of compute need no room: a session may have so much.

It may be paused after a few batches, so that loads can leave before the others are made out. Nobody waits for a save's
grant: with saves alone there is no pause.
"""

from __future__ import annotations

import math
import sys

from layerflow.flow.commands import Command, Submit
from layerflow.flow.cursor import Cohort, Cut
from layerflow.flow.events import Direction
from layerflow.flow.graph import Flight
from layerflow.flow.sessions import Session
from layerflow.flow.state import State


def grant(state: State, now: float, out: list[Command], most: int) -> None:
    """Grant whatever may run now; with loads among it up to `most` batches, ``state.paused`` if there are more."""
    loads, saves = state.rings
    full = len(out) + most if loads.queue else sys.maxsize
    state.paused = False
    if loads.queue and not _grant(state, Direction.LOAD, now, out, full):
        return
    if saves.queue:
        _grant(state, Direction.SAVE, now, out, full)


def _grant(state: State, direction: Direction, now: float, out: list[Command], full: int) -> bool:
    """Grant in one direction; False when a batch is waiting: for room, or because `out` is `full`."""
    ring, budget = state.rings[direction], state.budget
    limits, max_bytes = budget.limits, budget.max_batch[direction]
    while ring.queue:
        session = ring.queue[0]
        cohort = session.next_cohort(direction, budget)
        if cohort is None:
            ring.leave(session)
            continue
        cut = cohort.next_cut(limits.max_transfer_blocks, max_bytes)
        if not ring.turn(session, cut.nbytes, max_bytes):
            continue
        ahead = direction is Direction.SAVE and cohort.layer >= cohort.strand.leg.step.computed
        if not ahead and not budget.fits(direction, cut.nbytes):
            return False
        if len(out) >= full:
            state.paused = True
            return False
        ring.charge(session, cut.nbytes)
        out.append(_submit(state, session, cohort, cut, now))
    return True


def _submit(state: State, session: Session, cohort: Cohort, cut: Cut, now: float) -> Submit:
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
    flight = Flight(number, strand, layer, cut.lo, cut.hi, cut.nbytes)
    state.flights[number] = flight
    strand.flights[number] = flight
    leg.flying += 1
    state.budget.take(flight)
    state.counters.batches += 1
    not_before = 0.0
    if direction is Direction.LOAD and session.tp_size > 1 and state.budget.limits.stagger_us:
        not_before = stagger_slot(now, session.tp_rank, session.tp_size, layer, state.budget.limits.stagger_us)
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
        not_before,
        seals,
    )


def stagger_slot(now: float, tp_rank: int, tp_size: int, layer: int, stagger_us: int) -> float:
    """When a rank may start this layer's copy: its slot on a grid that all ranks of a machine share.

    Slot ``(tp_rank + layer) % tp_size`` of a period of ``tp_size`` slots, counted from the monotonic
    clock's zero.

    :returns: seconds, at least `now` and less than one period later.
    """
    stagger = stagger_us * 1e-6
    period = stagger * tp_size
    offset = stagger * ((tp_rank + layer) % tp_size)
    return max(now, offset + math.ceil((now - offset) / period) * period)

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
from layerflow.flow.events import Direction
from layerflow.flow.graph.cursor import BatchExtent, Cursor
from layerflow.flow.graph.session import Session
from layerflow.flow.graph.step import InFlightBatch
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
        cursor = session.next_cursor(direction, budget)
        if cursor is None:
            ring.park(session)
            continue
        extent = cursor.next_extent(limits.max_transfer_blocks, max_bytes)
        if not ring.turn(session, extent.nbytes, max_bytes):
            continue
        if not budget.fits(direction, extent.nbytes):
            return False
        if len(out) >= full:
            state.paused = True
            return False
        ring.charge(session, extent.nbytes)
        out.append(_submit(state, session, cursor, extent))
    return True


def _submit(state: State, session: Session, cursor: Cursor, extent: BatchExtent) -> Submit:
    transfer, layer = cursor.transfer, cursor.layer
    job = transfer.job
    direction, number = job.direction, state.next_batch
    state.next_batch = number + 1
    seals = False
    if cursor.advance(extent):
        if cursor.exhausted:
            transfer.remove(cursor)
            if not job.cursors:
                state.dequeue(job)
        else:
            transfer.merge(cursor)
        if transfer.low() > transfer.sealed:
            transfer.sealed += 1
            seals = True
    depth = state.budget.limits.prefetch_layers
    gate = layer if direction is Direction.SAVE else layer - depth if depth else -1
    batch = InFlightBatch(number, transfer, layer, extent.lo, extent.hi, extent.nbytes, gate)
    state.in_flight[number] = batch
    transfer.in_flight[number] = batch
    job.flying += 1
    state.budget.take(batch)
    state.counters.batches += 1
    return Submit(
        session.number,
        job.step.number,
        number,
        direction,
        layer,
        extent.lo,
        extent.hi,
        extent.byte_lo,
        extent.byte_hi,
        extent.nbytes,
        gate,
        seals,
    )

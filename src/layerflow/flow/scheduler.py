"""Handing out batches: loads before saves, nearest layer first, fair between sessions, within the budget.

Work-conserving: it grants until no permitted batch is left or the next one does not fit. A batch that
does not fit is not overtaken, neither by a smaller one (a session of large batches would starve) nor
by saves (loads come first). A session whose next batch would be gated, and finds no room for such batches,
leaves the ring until there is some; see :class:`~layerflow.flow.ring.SessionRing`.

It may be paused after a few batches, so that loads can leave before the others are made out. Nobody waits for a save's
grant: with saves alone there is no pause.
"""

from __future__ import annotations

import sys

from layerflow.flow.commands import Command, Submit
from layerflow.flow.events import LOAD, SAVE, Direction
from layerflow.flow.graph import Cursor, InFlightBatch, Session
from layerflow.flow.state import State
from layerflow.flow.window import BatchExtent


def grant(state: State, out: list[Command], most: int) -> None:
    """Grant whatever may run now; with loads among it up to `most` batches, ``state.paused`` if there are more."""
    loads, saves = state.rings
    state.paused = False
    budget = state.budget
    if budget.ungated or budget.regrown:
        for ring in state.rings:
            if ring.over_share:
                ring.wake(budget)
        budget.ungated.clear()
        budget.regrown = False
    if loads.line:
        loads.admit(budget)
    if saves.line:
        saves.admit(budget)
    full = len(out) + most if loads.queue else sys.maxsize
    if loads.queue and not _grant(state, LOAD, out, full):
        if saves.queue and budget.sessions > 1 and not state.paused:
            # Loads that wait for room may be those of an engine that is stopped: saves have what loads leave.
            _grant(state, SAVE, out, full, most=budget.max_batch[SAVE])
        return
    if saves.queue:
        _grant(state, SAVE, out, full)


def _grant(state: State, direction: Direction, out: list[Command], full: int, most: int = sys.maxsize) -> bool:
    """Grant in one direction; False when a batch is waiting: for room, or because `out` is `full`.

    :param most: bytes that may be charged in this direction.
    """
    ring, budget = state.rings[direction], state.budget
    limits, max_bytes = budget.limits, budget.max_batch[direction]
    while ring.queue:
        session = ring.queue[0]
        state.counters.tries += 1
        cursor, waiting_bytes = next_cursor(state, session, direction)
        if cursor is None:
            ring.park(session, waiting_bytes, budget)
            if ring.line:
                ring.admit(budget)
            continue
        extent = cursor.next_extent(limits.max_transfer_blocks, max_bytes)
        if not ring.turn(session, extent.nbytes, max_bytes):
            continue
        if not budget.fits(direction, extent.nbytes) or budget.charged[direction] + extent.nbytes > most:
            return False
        if len(out) >= full:
            state.paused = True
            return False
        ring.charge(session, extent.nbytes)
        gated = budget.gated[direction]
        out.append(_submit(state, session, cursor, extent))
        if ring.line and budget.gated[direction] > gated:
            ring.line.pop(session, None)  # for its next one it stands behind the others
            if ring.line:
                ring.admit(budget)
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
        if transfer.first_open_layer() > transfer.sealed:
            transfer.sealed += 1
            seals = True
    depth = state.budget.limits.prefetch_layers
    gate = layer if direction is SAVE else layer - depth if depth else -1
    batch = InFlightBatch(number, transfer, layer, extent.lo, extent.hi, extent.nbytes, gate)
    state.in_flight[number] = batch
    transfer.in_flight[number] = batch
    job.in_flight_count += 1
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


def next_cursor(state: State, session: Session, direction: Direction) -> tuple[Cursor | None, int]:
    """What the session moves next: loads by distance to the frontier, then by deadline; saves oldest step first.

    What cannot move yet (loads more than `prefetch_layers` past the frontier, saves that are not computed)
    is granted as long as there is room for such batches, and then waits.

    :returns: the cursor of what may be granted; and where there is none, the bytes of the batch that has no such room.
    """
    if direction is SAVE:
        return _next_save(state, session)
    jobs, prefetch_layers = session.pending[direction], state.budget.limits.prefetch_layers
    best: Cursor | None = None
    order = (0, 0.0)
    for job in jobs.values():
        head, step = job.head(), job.step
        if head is None:
            continue
        distance = head.layer - step.frontier
        if best is None or (distance, step.deadline) < order:
            best, order = head, (distance, step.deadline)
    if best is not None and 0 < prefetch_layers < order[0]:
        lacking = _lacks_gated(state, session, best, direction)
        return (None, lacking) if lacking else (best, 0)
    return best, 0


def _next_save(state: State, session: Session) -> tuple[Cursor | None, int]:
    lacking = 0
    for job in session.pending[SAVE].values():
        head = job.head()
        if head is None:
            continue
        if head.layer < job.step.computed:
            return head, 0
        if not lacking:  # a smaller one of a later step must not overtake it
            lacking = _lacks_gated(state, session, head, SAVE)
            if not lacking:
                return head, 0
    return None, lacking


def _lacks_gated(state: State, session: Session, cursor: Cursor, direction: Direction) -> int:
    """The bytes of the cursor's next batch where it has no room as a gated one; 0 = it has."""
    budget = state.budget
    nbytes = cursor.next_extent(budget.limits.max_transfer_blocks, budget.max_batch[direction]).nbytes
    fits = (
        state.rings[direction].may_gate(session)
        and budget.has_gated_room(direction, nbytes)
        and budget.within_share(session, direction, nbytes)
    )
    return 0 if fits else nbytes

"""What the lanes report: batches that ended, layers that have come, sessions that are gone."""

from __future__ import annotations

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Command, LoadsDone, Revoke
from layerflow.flow.events import LOAD, SAVE, BatchDone, BatchFailed
from layerflow.flow.graph.session import Session
from layerflow.flow.graph.step import InFlightBatch, TransferJob
from layerflow.flow.progress.completion import cancel_save_parts, drained, fail_load_range, forget
from layerflow.flow.progress.writes import lose_parts
from layerflow.flow.state import State


def batch_done(state: State, event: BatchDone, out: list[Command], *, by_plan: bool = False) -> None:
    """Its bytes are in place.

    :param by_plan: the end of planned loads, of which no batch was granted.
    """
    batch = _land(state, event, by_plan=by_plan)
    if batch is None:
        return
    job = batch.transfer.job
    job.moved += batch.nbytes
    if job.direction is LOAD:
        state.counters.loaded_bytes += batch.nbytes
    else:
        state.counters.saved_bytes += batch.nbytes
    _landed(state, batch, out)


def batch_failed(state: State, event: BatchFailed, out: list[Command]) -> None:
    """Its bytes are not all in place: the parts it carried fail, and nobody else's."""
    batch = _land(state, event)
    if batch is None:
        return
    transfer = batch.transfer
    state.counters.batches_failed += 1
    if transfer.job.direction is LOAD:
        fail_load_range(state, transfer, (batch.lo, batch.hi), event.reason, out)
    else:
        hit = transfer.overlapping(batch.lo, batch.hi)
        cancel_save_parts(state, transfer.job.step, hit, event.reason, out)
    _landed(state, batch, out)


def _land(state: State, event: BatchDone | BatchFailed, *, by_plan: bool = False) -> InFlightBatch | None:
    """Take a batch out of flight; None = it is long gone.

    :raises InvalidTransition: for a batch that was never granted, be it to this session or as part of a plan.
    """
    batch = state.in_flight.get(event.batch)
    if batch is None:
        if state.session(event.session) is None:
            return None
        if not 0 < event.batch < state.next_batch:
            raise InvalidTransition(f"session {event.session} reported batch {event.batch}, which was never granted")
        state.counters.late_reports += 1
        return None
    transfer = batch.transfer
    job = transfer.job
    step = job.step
    if job.planned and not by_plan:
        raise step.impossible(
            f"was told of batch {event.batch}, which stands for loads that the worker moves by itself"
        )
    if step.session.number != event.session:
        raise InvalidTransition(
            f"session {event.session} reported batch {event.batch}, which session {step.session.number} has "
            f"for step {step.number}",
            step.told(),
        )
    step.story.append(event)
    del state.in_flight[event.batch]
    del transfer.in_flight[event.batch]
    job.flying -= 1
    state.budget.give(batch)
    if job.direction is SAVE:
        if transfer.watched:
            state.advanced.append(transfer)
        step.session.unsaved -= batch.nbytes
    return batch


def _landed(state: State, batch: InFlightBatch, out: list[Command]) -> None:
    transfer = batch.transfer
    for barrier in batch.watch or ():
        barrier.pending -= 1
        if not barrier.pending:
            drained(state, transfer.job.step.session, barrier, out)
    if not transfer.in_flight and not transfer.pending:
        state.unsettled.append(transfer.job.step)


def lose_session(state: State, session: Session, out: list[Command]) -> None:
    """Nobody is left who could touch its memory or write its objects: all that is unfinished goes back at once."""
    del state.sessions[session.number]
    state.budget.sessions -= 1
    state.budget.regrown = True
    for ring in state.rings:
        ring.leave(session)
    state.counters.sessions_lost += 1
    for step in list(session.steps.values()):
        for job in (step.loads, step.saves):
            if job is not None:
                _ground(state, job)
        if step.saves is not None and step.saves.open:
            unfinished = [
                position
                for transfer in step.saves.transfers.values()
                for position in transfer.members
                if position not in step.saves.revoked
                and not (transfer.committed and position not in step.saves.dropped)
            ]
            state.counters.revoked_parts += len(unfinished)
            reason = "the session was lost"
            out.append(Revoke(session.number, step.number, tuple(sorted(unfinished)), reason))
            for transfer in step.saves.transfers.values():
                lose_parts(state, transfer, unfinished, reason, out)
                if transfer.follows:
                    state.severed.append((transfer, unfinished, reason))
        if step.loads is not None and not step.loads.done:
            step.loads.done = True
            state.loosened.append(step.loads)
            out.append(LoadsDone(session.number, step.number))
        forget(state, step, out)
    for pending in session.pending:
        pending.clear()
    session.aborting.clear()


def _ground(state: State, job: TransferJob) -> None:
    for transfer in job.transfers.values():
        for number, batch in transfer.in_flight.items():
            del state.in_flight[number]
            state.budget.give(batch)

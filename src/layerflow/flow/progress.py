"""What becomes of an open step: its batches end, its parts are finalized, fail or are cancelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import (
    Cancel,
    Command,
    Commit,
    LoadFailed,
    LoadsDone,
    Release,
    Revoke,
    Seal,
    StepDone,
)
from layerflow.flow.events import (
    LOAD,
    SAVE,
    BatchDone,
    BatchFailed,
    Direction,
    FailedRange,
    LoadsLost,
    LoadsMoved,
    StepOpened,
)
from layerflow.flow.graph import (
    CANCELLED,
    ENDED,
    OPEN,
    DrainBarrier,
    FlowStep,
    InFlightBatch,
    Session,
    Span,
    Transfer,
    TransferJob,
    add_span,
    joined,
    missing,
    touches,
)
from layerflow.flow.state import State
from layerflow.flow.writes import commit_write, lose_parts


def finalize_step_if_done(state: State, step: FlowStep, out: list[Command]) -> None:
    """Say what has become true of the step, and forget it when nothing is left.

    A commit waits for the step's loads, and for those of earlier steps for the same requests: a request
    whose load fails late has computed garbage.
    """
    if step.session.steps.get(step.number) is not step:
        return
    loads, saves = step.loads, step.saves
    if loads is not None and loads.state is not ENDED and loads.idle:
        loads.enter(ENDED)
        state.finished_loads.append(loads)
        out.append(LoadsDone(step.session.number, step.number))
        release_held(state, step)
    loaded = loads is None or loads.state is ENDED
    if saves is not None and saves.open and loaded:
        _commit(state, saves, out)
    if step.closed and loaded and (saves is None or not (saves.open or saves.in_flight_count)):
        forget(state, step, out)
    else:
        state.deadlines.set(step, step.next_alarm())


def _commit(state: State, saves: TransferJob, out: list[Command]) -> None:
    ready = [s for s in saves.transfers.values() if not (s.committed or s.pending or s.in_flight)]
    saves.held = bool(ready) and builds_on_loads(saves, ready)
    if saves.held:
        return
    parts: list[int] = []
    for transfer in ready:
        transfer.committed = True
        parts += [part for part in transfer.members if part not in saves.dropped] if saves.dropped else transfer.members
    if parts:
        saves.close_parts(len(parts))
        state.counters.committed_parts += len(parts)
        out.append(Commit(saves.step.session.number, saves.step.number, tuple(sorted(parts))))
    for transfer in ready:
        commit_write(state, transfer, out)
        if transfer.follows:
            state.committed_saves.append(transfer)


def builds_on_loads(saves: TransferJob, transfers: Iterable[Transfer]) -> bool:
    """Whether an earlier step still loads for a request that this job saves. Costs O(their parts)."""
    requests: set[str] | None = None
    for step in saves.step.session.steps.values():
        if step is saves.step:
            break
        if step.loads is not None and step.loads.state is OPEN:
            if requests is None:
                live = (part for transfer in transfers for part in transfer.members if part not in saves.dropped)
                requests = {saves.parts[part].request for part in live}
            if not requests.isdisjoint(step.loads.requests()):
                return True
    return False


def release_held(state: State, step: FlowStep) -> None:
    """The step's loads are decided: commits that waited for them are looked at again."""
    for other in step.session.steps.values():
        if other.saves is not None and other.saves.held:
            state.dirty_steps.append(other)


def forget(state: State, step: FlowStep, out: list[Command]) -> None:
    """The step is over."""
    del step.session.steps[step.number]
    state.deadlines.set(step, float("inf"))
    state.counters.steps_done += 1
    state.forgotten.append(step)
    loaded = step.loads.moved if step.loads is not None else 0
    saved = step.saves.moved if step.saves is not None else 0
    out.append(StepDone(step.session.number, step.number, loaded, saved))


def seal_rest(job: TransferJob, out: list[Command]) -> None:
    """Seal the layers of which nothing is left to be granted because it was cancelled."""
    if job.state is not OPEN:
        return
    for transfer in job.transfers.values():
        low = transfer.first_open_layer()
        for layer in transfer.shape.layers[transfer.sealed : low]:
            out.append(Seal(job.step.session.number, job.step.number, job.direction, layer))
        transfer.sealed = max(transfer.sealed, low)


def revoke(state: State, step: FlowStep, parts: Sequence[int], reason: str, out: list[Command]) -> None:
    """Give save parts back; nothing may write them any more."""
    saves = step.saves
    assert saves is not None
    saves.revoked.update(parts)
    saves.close_parts(len(parts))
    state.counters.revoked_parts += len(parts)
    state.dirty_steps.append(step)
    out.append(Revoke(step.session.number, step.number, tuple(parts), reason))
    for transfer in saves.transfers.values():
        lose_parts(state, transfer, parts, reason, out)


def drained(state: State, session: Session, barrier: DrainBarrier, out: list[Command]) -> None:
    """Every batch that was waited for has ended."""
    if barrier.revoke is not None:
        revoke(state, *barrier.revoke, out)
    if barrier.release is not None:
        session.aborting.pop(barrier.release, None)
        out.append(Release(session.number, barrier.release))


def cancel_parts(state: State, job: TransferJob, positions: Iterable[int]) -> list[int]:
    """Grant these parts no further. Returns those that were not cancelled before."""
    fresh = [
        position
        for position in positions
        if position not in job.dropped and not (job.direction is Direction.SAVE and job.transfer_of(position).committed)
    ]
    job.dropped.update(fresh)
    for position in fresh:
        job.transfer_of(position).live_parts -= 1
    if job.cursors and fresh:
        for transfer, holes in job.spans_of(fresh):
            _drop_blocks(job, transfer, holes)
    if not job.cursors:
        state.dequeue(job)
    state.permit(job.step.session, job.direction)
    state.progressed_saves += [transfer for transfer in job.transfers.values() if transfer.has_observers]
    return fresh


def _drop_blocks(job: TransferJob, transfer: Transfer, holes: list[Span]) -> None:
    for cursor in transfer.cursors():
        freed = cursor.drop(holes)
        if job.direction is Direction.SAVE:
            job.step.session.unsaved -= freed
        if cursor.exhausted:
            transfer.remove(cursor)
    for cursor in transfer.cursors():
        if cursor in job.cursors and cursor.fresh:
            transfer.merge(cursor)


def cancel_save_parts(state: State, step: FlowStep, positions: Iterable[int], reason: str, out: list[Command]) -> None:
    """Cancel save parts, which will never be published; they are revoked once no batch touches them."""
    job = step.saves
    if job is None or not job.open:
        return
    fresh = cancel_parts(state, job, positions)
    if not fresh:
        return
    seal_rest(job, out)
    state.cancelled_saves += [(transfer, fresh, reason) for transfer in job.transfers.values() if transfer.follows]
    barrier = DrainBarrier(revoke=(step, tuple(sorted(fresh)), reason))
    barrier.watch(job.spans_of(fresh))
    if not barrier.pending:
        drained(state, step.session, barrier, out)


def invalidate_saves(
    state: State, step: FlowStep, load_positions: Iterable[int], reason: str, out: list[Command]
) -> None:
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
            cancel_save_parts(state, other, other.saves.positions_of(requests), f"its load failed: {reason}", out)


def fail_loads(state: State, job: TransferJob, positions: Iterable[int], reason: str, out: list[Command]) -> None:
    """Fail load parts: report each whole (less what was reported before), grant no further."""
    fresh = cancel_parts(state, job, positions)
    for position in fresh:
        lo, hi = job.transfer_of(position).span(position)
        _report(state, job, position, span=(lo, hi), reason=reason, out=out)
    if fresh:
        invalidate_saves(state, job.step, fresh, reason, out)
        seal_rest(job, out)


def _report(state: State, job: TransferJob, position: int, *, span: Span, reason: str, out: list[Command]) -> None:
    transfer, part, step = job.transfer_of(position), job.parts[position], job.step
    if not touches(transfer.failed, *transfer.span(position)):
        state.counters.failed_parts += 1
    for lo, hi in missing(transfer.failed, *span):
        out.append(LoadFailed(step.session.number, step.number, part.request, part.group, lo, hi, reason))
    add_span(transfer.failed, *span)


def fail_load_range(state: State, transfer: Transfer, span: Span, reason: str, out: list[Command]) -> None:
    """A load batch failed.

    A part that had more to come fails whole: its later layers stay behind. A part whose last layer is
    already granted loses exactly the failed blocks; the rest of it still arrives.
    """
    job = transfer.job
    coming = sorted(span for cursor in transfer.cursors() for span in cursor.spans)
    failing: list[int] = []
    hurt: list[int] = []
    for position in transfer.overlapping(*span):
        if position not in job.dropped:
            (failing if touches(coming, *transfer.span(position)) else hurt).append(position)
    for position in hurt:
        lo, hi = transfer.span(position)
        _report(state, job, position, span=(max(lo, span[0]), min(hi, span[1])), reason=reason, out=out)
    invalidate_saves(state, job.step, hurt, reason, out)
    fail_loads(state, job, failing, reason, out)


def fail_blocks(state: State, transfer: Transfer, spans: list[Span], reason: str, out: list[Command]) -> None:
    """The objects of these blocks will not come: exactly they fail, and are granted no further."""
    job = transfer.job
    hurt: list[int] = []
    for span in spans:
        for position in transfer.overlapping(*span):
            if position not in job.dropped:
                lo, hi = transfer.span(position)
                _report(state, job, position, span=(max(lo, span[0]), min(hi, span[1])), reason=reason, out=out)
                hurt.append(position)
    _drop_blocks(job, transfer, spans)
    if not job.cursors:
        state.dequeue(job)
    state.permit(job.step.session, job.direction)
    invalidate_saves(state, job.step, hurt, reason, out)
    seal_rest(job, out)
    state.dirty_steps.append(job.step)


def fence_loads(state: State, job: TransferJob, reason: str, out: list[Command], *, cancel: bool) -> None:
    """Every load part with anything outstanding fails; what is in flight is awaited."""
    job.enter(CANCELLED)
    outstanding: set[int] = set()
    for transfer in job.transfers.values():
        ranges = [span for cursor in transfer.cursors() for span in cursor.spans]
        ranges += [(batch.lo, batch.hi) for batch in transfer.in_flight.values()]
        for lo, hi in joined(ranges):
            outstanding.update(transfer.overlapping(lo, hi))
    fail_loads(state, job, sorted(outstanding), reason, out)
    state.stop_charging(job.transfers.values())
    release_held(state, job.step)
    if cancel:
        out.append(Cancel(job.step.session.number, job.step.number, Direction.LOAD, reason))
    state.dirty_steps.append(job.step)


def cancel_saves(state: State, job: TransferJob, reason: str, out: list[Command]) -> None:
    """Every save part that is not committed is cancelled, and whatever waits for compute is called back."""
    job.enter(CANCELLED)
    out.append(Cancel(job.step.session.number, job.step.number, Direction.SAVE, reason))
    cancel_save_parts(state, job.step, range(len(job.parts)), reason, out)
    state.stop_charging(job.transfers.values())


def cancel_uncomputed(state: State, job: TransferJob, reason: str, out: list[Command]) -> None:
    """The layers that are not computed never will be: parts that lack one of them die."""
    step = job.step
    lost = [
        transfer
        for transfer in job.transfers.values()
        if not transfer.committed and transfer.shape.layers[-1] >= step.computed
    ]
    if len(lost) == len(job.transfers):
        job.enter(CANCELLED)
    if any(batch.layer >= step.computed for transfer in lost for batch in transfer.in_flight.values()):
        out.append(Cancel(step.session.number, step.number, Direction.SAVE, reason))
    cancel_save_parts(state, step, sorted(position for transfer in lost for position in transfer.members), reason, out)
    state.stop_charging(lost)


def abort(state: State, steps: Iterable[FlowStep], request: str, out: list[Command]) -> DrainBarrier:
    """The request's parts die in every step. Returns what waits for the batches that still touch them."""
    barrier = DrainBarrier(release=request)
    for step in steps:
        if step.loads is not None and (loads := step.loads.positions_of((request,))):
            cancel_parts(state, step.loads, loads)
            seal_rest(step.loads, out)
            barrier.watch(step.loads.spans_of(loads))
            state.dirty_steps.append(step)
        if step.saves is not None and (saves := step.saves.positions_of((request,))):
            cancel_save_parts(state, step, saves, "the request was aborted", out)
            barrier.watch(step.saves.spans_of(saves))
    return barrier


# What the lanes report: batches that ended, layers that have come, sessions that are gone.


def batch_done(state: State, event: BatchDone, out: list[Command], *, by_plan: bool = False) -> None:
    """Take the end of a batch whose bytes are in place.

    :param by_plan: the end of planned loads, of which no batch was granted.
    """
    batch = _take_out(state, event, by_plan=by_plan)
    if batch is None:
        return
    job = batch.transfer.job
    job.moved += batch.nbytes
    if job.direction is LOAD:
        state.counters.loaded_bytes += batch.nbytes
    else:
        state.counters.saved_bytes += batch.nbytes
    _after_batch(state, batch, out)


def batch_failed(state: State, event: BatchFailed, out: list[Command]) -> None:
    """Take the end of a batch whose bytes are not all in place: the parts it carried fail, and nobody else's."""
    batch = _take_out(state, event)
    if batch is None:
        return
    transfer = batch.transfer
    state.counters.batches_failed += 1
    if transfer.job.direction is LOAD:
        fail_load_range(state, transfer, (batch.lo, batch.hi), event.reason, out)
    else:
        hit = transfer.overlapping(batch.lo, batch.hi)
        cancel_save_parts(state, transfer.job.step, hit, event.reason, out)
    _after_batch(state, batch, out)


def _take_out(state: State, event: BatchDone | BatchFailed, *, by_plan: bool = False) -> InFlightBatch | None:
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
            step.recent_events(),
        )
    step.heard(event)
    del state.in_flight[event.batch]
    del transfer.in_flight[event.batch]
    job.in_flight_count -= 1
    state.budget.give(batch)
    if job.direction is SAVE:
        if transfer.has_observers:
            state.progressed_saves.append(transfer)
        step.session.unsaved -= batch.nbytes
    return batch


def _after_batch(state: State, batch: InFlightBatch, out: list[Command]) -> None:
    transfer = batch.transfer
    for barrier in batch.watch or ():
        barrier.pending -= 1
        if not barrier.pending:
            drained(state, transfer.job.step.session, barrier, out)
    if not transfer.in_flight and not transfer.pending:
        state.dirty_steps.append(transfer.job.step)


def lose_session(state: State, session: Session, out: list[Command]) -> None:
    """End a session whose worker can touch nothing any more: all that is unfinished goes back at once."""
    del state.sessions[session.number]
    state.budget.sessions -= 1
    state.budget.regrown = True
    for ring in state.rings:
        ring.leave(session)
    state.counters.sessions_lost += 1
    for step in list(session.steps.values()):
        for job in (step.loads, step.saves):
            if job is not None:
                _release_in_flight(state, job)
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
                    state.cancelled_saves.append((transfer, unfinished, reason))
        if step.loads is not None and step.loads.state is not ENDED:
            step.loads.enter(ENDED)
            state.finished_loads.append(step.loads)
            out.append(LoadsDone(session.number, step.number))
        forget(state, step, out)
    for pending in session.pending:
        pending.clear()
    session.aborting.clear()


def _release_in_flight(state: State, job: TransferJob) -> None:
    for transfer in job.transfers.values():
        for number, batch in transfer.in_flight.items():
            del state.in_flight[number]
            state.budget.give(batch)


# Loads that a worker moves by itself: it has their places from its lookup, and a window of its own.
#
# The core grants them nothing. It waits for their end as for any batch in flight: aborts are not released before, what
# was computed on top of them is not published before, and a fence, a deadline or a lost session finds them.


def check_planned(event: StepOpened) -> None:
    """:raises InvalidTransition: a worker cannot move what is yet to be fetched."""
    if event.planned and any(part.needs for part in event.loads):
        raise InvalidTransition(
            f"session {event.session} step {event.step}: its loads are planned, and some of their objects are yet to "
            "be fetched"
        )


def track_worker_driven(state: State, job: TransferJob) -> None:
    """The worker moves all of the job. Its bytes are charged to the worker's window, not here."""
    for transfer in job.transfers.values():
        number, layers = state.next_batch, transfer.shape.layers
        state.next_batch = number + 1
        batch = InFlightBatch(number, transfer, layers[0], 0, transfer.starts[-1], 0)
        state.in_flight[number] = batch
        transfer.in_flight[number] = batch
        transfer.sealed = len(layers)
        job.in_flight_count += 1
        state.budget.take(batch)


def loads_lost(state: State, event: LoadsLost, out: list[Command]) -> None:
    """Take some of what has failed of loads that their worker moves: it fails block by block.

    :raises InvalidTransition: the step's loads are not the worker's to move, or do not have these blocks.
    """
    loads = _planned_loads(state, event)
    if loads is None:
        return
    _check_failed(loads, event.failed)
    if not loads.in_flight_count:
        state.counters.late_reports += 1
        return
    loads.lost_ranges += len(event.failed)
    _lose_blocks(state, loads, event.failed, out)


def loads_moved(state: State, event: LoadsMoved, out: list[Command]) -> None:
    """Take the end of loads that their worker has moved; what failed has failed block by block.

    :raises InvalidTransition: the step's loads are not the worker's to move, or cannot have ended so.
    """
    loads = _planned_loads(state, event)
    if loads is None:
        return
    step = loads.step
    most = sum(transfer.starts[-1] * transfer.shape.tail_bytes[0] for transfer in loads.transfers.values())
    if not 0 <= event.nbytes <= most:
        raise step.impossible(f"moved {event.nbytes} of {most} bytes")
    _check_failed(loads, event.failed)
    if not loads.in_flight_count:
        state.counters.late_reports += 1
        return
    # Where the loads are cut off, all of them have failed: whatever was told of them, this ends them.
    if loads.state is OPEN and event.lost_ranges != loads.lost_ranges:
        raise step.impossible(
            f"ended with {event.lost_ranges} failed ranges told, of {loads.lost_ranges} possible ones"
        )
    _lose_blocks(state, loads, event.failed, out)
    loads.moved += event.nbytes
    state.counters.loaded_bytes += event.nbytes
    for transfer in loads.transfers.values():
        for number in list(transfer.in_flight):
            batch_done(state, BatchDone(event.session, number), out, by_plan=True)


def _planned_loads(state: State, event: LoadsLost | LoadsMoved) -> TransferJob | None:
    """The loads that an event is about; None = their step is finished, or was never opened."""
    step = state.step(event, event.session, event.step)
    if step is not None and (step.loads is None or not step.loads.planned):
        raise step.impossible("moved loads that were not planned")
    return step.loads if step is not None else None


def _check_failed(loads: TransferJob, failed: Iterable[FailedRange]) -> None:
    for group, lo, hi, _ in failed:
        if group not in loads.transfers or not 0 <= lo < hi <= loads.transfers[group].starts[-1]:
            raise loads.step.impossible(f"failed blocks {lo} to {hi} of group {group}, which it does not load")


def _lose_blocks(state: State, loads: TransferJob, failed: Iterable[FailedRange], out: list[Command]) -> None:
    """Blocks of planned loads have failed. Each is looked at once, however often it is told.

    What a request saves is cancelled at its first loss, once: a worker opens no step while it tells of one's end. All
    requests of an event are cancelled together, with its first reason: each time costs all that open steps save.
    """
    hurt: list[int] = []
    first_reason = ""
    for group, lo, hi, reason in failed:
        transfer = loads.transfers[group]
        for fresh in missing(transfer.failed, lo, hi):
            for position in transfer.overlapping(*fresh):
                first, behind = transfer.span(position)
                span = (max(first, fresh[0]), min(behind, fresh[1]))
                if position in loads.dropped:
                    add_span(transfer.failed, *span)
                    continue
                _report(state, loads, position, span=span, reason=reason, out=out)
                request = loads.parts[position].request
                if request not in loads.hurt:
                    loads.hurt.add(request)
                    hurt.append(position)
                    first_reason = first_reason or reason
    invalidate_saves(state, loads.step, hurt, first_reason, out)

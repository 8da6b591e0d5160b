"""Loads that a worker moves by itself: it has their places from its lookup, and a window of its own.

The core grants them nothing. It waits for their end as for any batch in flight: aborts are not released before, what
was computed on top of them is not published before, and a fence, a deadline or a lost session finds them.
"""

from __future__ import annotations

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Command
from layerflow.flow.events import BatchDone, LoadsMoved, StepOpened
from layerflow.flow.graph.step import InFlightBatch, TransferJob
from layerflow.flow.progress.completion import fail_load_range
from layerflow.flow.progress.reports import batch_done
from layerflow.flow.state import State


def check_planned(event: StepOpened) -> None:
    """:raises InvalidTransition: a worker cannot move what is yet to be fetched."""
    if event.planned and any(part.needs for part in event.loads):
        raise InvalidTransition(
            f"session {event.session} step {event.step}: its loads are planned, and some of their objects are yet to "
            "be fetched"
        )


def let_move(state: State, job: TransferJob) -> None:
    """The worker moves all of the job. Its bytes are charged to the worker's window, not here."""
    for transfer in job.transfers.values():
        number, layers = state.next_batch, transfer.shape.layers
        state.next_batch = number + 1
        batch = InFlightBatch(number, transfer, layers[0], 0, transfer.starts[-1], 0)
        state.in_flight[number] = batch
        transfer.in_flight[number] = batch
        transfer.sealed = len(layers)
        job.flying += 1
        state.budget.take(batch)


def loads_moved(state: State, event: LoadsMoved, out: list[Command]) -> None:
    """They have ended; what failed has failed block by block.

    :raises InvalidTransition: the step's loads are not the worker's to move, or cannot have ended so.
    """
    step = state.step(event, event.session, event.step)
    if step is None:
        return
    loads = step.loads
    if loads is None or not loads.planned:
        raise step.impossible("moved loads that were not planned")
    most = sum(transfer.starts[-1] * transfer.shape.tail_bytes[0] for transfer in loads.transfers.values())
    if not 0 <= event.nbytes <= most:
        raise step.impossible(f"moved {event.nbytes} of {most} bytes")
    for group, lo, hi, _ in event.failed:
        if group not in loads.transfers or not 0 <= lo < hi <= loads.transfers[group].starts[-1]:
            raise step.impossible(f"failed blocks {lo} to {hi} of group {group}, which it does not load")
    if not loads.flying:
        state.counters.late_reports += 1
        return
    for group, lo, hi, reason in event.failed:
        fail_load_range(state, loads.transfers[group], (lo, hi), reason, out)
    loads.moved += event.nbytes
    state.counters.loaded_bytes += event.nbytes
    for transfer in loads.transfers.values():
        for number in list(transfer.in_flight):
            batch_done(state, BatchDone(event.session, number), out, by_plan=True)

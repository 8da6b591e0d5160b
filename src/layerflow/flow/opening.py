"""A step from its message: checked, then a transfer for each group and direction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from layerflow.errors import InvalidTransition
from layerflow.flow.arrivals.fetches import check_needs, lay_out
from layerflow.flow.commands import Command, Revoke
from layerflow.flow.events import Direction, Part, StepOpened
from layerflow.flow.graph.session import Session
from layerflow.flow.graph.step import Step, Transfer, TransferJob
from layerflow.flow.progress.completion import cancel_save_parts
from layerflow.flow.progress.planned import check_planned, let_move
from layerflow.flow.progress.writes import SHED
from layerflow.flow.state import State


def open_step(state: State, session: Session, event: StepOpened, out: list[Command]) -> None:
    """Add the step; its saves are shed where the session has too much unsaved already.

    :raises InvalidTransition: for a step that is open already, or parts that cannot be.
    """
    if event.step in session.steps:
        raise InvalidTransition(
            f"session {session.number} opened step {event.step} twice; step numbers are not reused while a step lives",
            session.steps[event.step].told(),
        )
    if event.deadline != event.deadline or event.save_deadline != event.save_deadline:
        raise InvalidTransition(f"session {session.number} step {event.step}: a deadline is not a number")
    _check(session, event, event.loads, "load")
    _check_needs(state, session, event)
    check_planned(event)
    _check(session, event, event.saves, "save")

    step = Step(session, event.step, event.deadline, event.save_deadline)
    step.story.append(event)
    session.steps[event.step] = step
    if event.loads:
        step.loads = _job(state, step, Direction.LOAD, event.loads, planned=event.planned)
        if event.planned:
            let_move(state, step.loads)
        else:
            state.enqueue(step.loads)
    if event.saves:
        saves = _job(state, step, Direction.SAVE, event.saves)
        nbytes = sum(transfer.starts[-1] * transfer.shape.tail_bytes[0] for transfer in saves.transfers.values())
        shed: list[int] = []
        if session.unsaved + nbytes > state.budget.limits.save_backlog_bytes:
            shed = [position for position, part in enumerate(event.saves) if not part.promised]
        state.counters.shed_parts += len(shed)
        if len(shed) == len(event.saves):
            state.counters.revoked_parts += len(shed)
            out.append(Revoke(session.number, step.number, tuple(shed), SHED))
        else:
            session.unsaved += nbytes
            saves.open = len(event.saves)
            step.saves = saves
            state.enqueue(saves)
            if shed:
                cancel_save_parts(state, step, shed, SHED, out)
    state.deadlines.set(step, step.next_alarm())


def _check(session: Session, event: StepOpened, parts: Sequence[Part], what: str) -> None:
    unknown = {part.group for part in parts} - session.groups.keys()
    if not unknown and (not parts or min([part.blocks for part in parts]) > 0):
        return
    for position, part in enumerate(parts):
        if part.blocks <= 0 or part.group in unknown:
            raise InvalidTransition(
                f"session {session.number} step {event.step}: {what} part {position} (request {part.request!r}) has "
                f"{part.blocks} blocks of group {part.group}; it needs at least one block of one of the session's "
                f"groups {sorted(session.groups)}"
            )


def _check_needs(state: State, session: Session, event: StepOpened) -> None:
    for position, part in enumerate(event.loads):
        if part.needs and (wrong := check_needs(state, part, session.groups[part.group].layers)):
            raise InvalidTransition(f"session {session.number} step {event.step}: load part {position} {wrong}")


def _job(
    state: State, step: Step, direction: Direction, parts: tuple[Part, ...], *, planned: bool = False
) -> TransferJob:
    job = TransferJob(step, direction, parts, planned=planned)
    groups = {part.group for part in parts}
    arrives = direction is Direction.LOAD and any([part.needs for part in parts])
    for group in sorted(groups):
        members: Sequence[int] = range(len(parts))
        if len(groups) > 1:
            members = [position for position, part in enumerate(parts) if part.group == group]
        starts = list(accumulate([parts[position].blocks for position in members], initial=0))
        transfer = Transfer(job, step.session.groups[group], members, starts)
        job.transfers[group] = transfer
        if arrives:
            lay_out(state, transfer)
        elif not planned:
            transfer.add_cursor([(0, starts[-1])])
    return job

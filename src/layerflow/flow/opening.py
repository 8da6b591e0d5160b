"""A step from its one message: checked before anything changes, then laid out group by group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Command, Revoke
from layerflow.flow.events import Direction, Part, StepOpened
from layerflow.flow.fetches import check_needs, lay_out
from layerflow.flow.sessions import Session
from layerflow.flow.state import State
from layerflow.flow.steps import Leg, Step, Strand


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
    _check(session, event, event.saves, "save")

    step = Step(session, event.step, event.deadline, event.save_deadline)
    step.story.append(event)
    session.steps[event.step] = step
    if event.loads:
        step.loads = _leg(state, step, Direction.LOAD, event.loads)
        state.carve_later(step.loads)
    if event.saves:
        saves = _leg(state, step, Direction.SAVE, event.saves)
        nbytes = sum(strand.starts[-1] * strand.shape.tail_bytes[0] for strand in saves.strands.values())
        if session.unsaved + nbytes > state.budget.limits.save_backlog_bytes:
            state.counters.shed_parts += len(event.saves)
            state.counters.revoked_parts += len(event.saves)
            out.append(Revoke(session.number, step.number, tuple(range(len(event.saves))), "shed"))
        else:
            session.unsaved += nbytes
            saves.open = len(event.saves)
            saves.tell = event.tell_stored
            step.saves = saves
            state.carve_later(saves)
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


def _leg(state: State, step: Step, direction: Direction, parts: tuple[Part, ...]) -> Leg:
    leg = Leg(step, direction, parts)
    groups = {part.group for part in parts}
    arrives = direction is Direction.LOAD and any([part.needs for part in parts])
    for group in sorted(groups):
        members: Sequence[int] = range(len(parts))
        if len(groups) > 1:
            members = [position for position, part in enumerate(parts) if part.group == group]
        starts = list(accumulate([parts[position].blocks for position in members], initial=0))
        strand = Strand(leg, step.session.groups[group], members, starts)
        leg.strands[group] = strand
        if arrives:
            lay_out(state, strand)
        else:
            strand.add_cohort([(0, starts[-1])])
    return leg

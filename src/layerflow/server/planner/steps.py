"""A step's objects: which lie where (loads), which get room (saves), and what the core is told of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerflow.boxes import Replica
from layerflow.flow.events import Event, StepOpened
from layerflow.pool.base import Pool
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.planner.book import Opening, StepBook, step_owner
from layerflow.server.planner.check import CheckedStep
from layerflow.server.planner.loads import plan_loads, take_over
from layerflow.server.planner.saves import MissedTurns, plan_saves
from layerflow.wire.messages import OpenStep, Plan

if TYPE_CHECKING:
    from layerflow.server.handoffs.follows import Follows
    from layerflow.server.handoffs.registry import Handoffs
    from layerflow.server.sources import Sources


def plan_step(
    pool: Pool,
    tier: Sources | None,
    session: ClientSession,
    message: OpenStep,
    checked: CheckedStep,
    replicas: Sequence[Replica],
    missed: MissedTurns,
    handoffs: Handoffs,
    follows: Follows,
) -> Opening:
    """Pin the objects to load, reserve room for those to save, and number the blocks.

    What the arena lacks is fetched from the tier.

    :param replicas: per group, which of the workers that hold the same heads this one is: they take turns in storing.
    :param missed: what another one has not stored in its turn.
    :param handoffs: those of the worker's engine have room for what they wait for.
    :param follows: what another step is still storing, for requests that may wait for it.
    """
    spec = session.spec
    assert spec is not None
    loads, saves = checked.loads, checked.saves
    book = StepBook(step_owner(session.number, message.step), in_turns=any(each.copies > 1 for each in replicas))
    load_plan, load_parts, bad, covered = (
        take_over(pool, session, book, message, loads)
        if message.planned
        else plan_loads(pool, tier, session, book, loads, handoffs, follows)
    )
    save_plan, save_parts, full, placed = plan_saves(
        pool, book, saves, bad, replicas, missed, functools.partial(handoffs.adopt, session.engine)
    )
    opened = StepOpened(
        session.number,
        message.step,
        message.deadline,
        message.save_deadline,
        tuple(load_parts),
        tuple(save_parts),
        planned=message.planned,
    )
    events: list[Event] = [opened]
    if tier is not None:
        for group, (objects, parts) in placed.items():
            events += tier.plan(
                (session.number, message.step), session.engine, group, len(spec.groups[group].layers), objects, parts
            )
    for group, (objects, parts) in placed.items():
        saved = {new.key: part for (new, _), part in zip(objects, parts, strict=True)}
        events += follows.adopted((session.number, message.step), group, saved)
    # Objects that other ranks load too stay leased for them, until the lease ends.
    loaded = [(wanted.request, wanted.keys) for wanted in loads if spec.shard.copy_of(wanted.group).copies == 1]
    urgent = any(part.promised for part in save_parts)
    plan = Plan(message.step, load_plan, save_plan, covered, urgent)
    return Opening(events, plan, book, loaded, full, len(bad))

"""Steps of engine workers: opened within the session's quotas, and what is reported of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
import structlog

from layerflow.errors import InvalidTransition, ProtocolError, shortened
from layerflow.flow.events import (
    BatchDone,
    BatchFailed,
    Event,
    FailedRange,
    FrontierReached,
    LayersComputed,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    StepClosed,
)
from layerflow.recording.format import StepMeasured
from layerflow.recording.notes import StepNote
from layerflow.server.account import Refused
from layerflow.server.clients import ClientSession
from layerflow.server.handlers.context import ServerContext
from layerflow.server.leases import lease_owner
from layerflow.server.mailboxes import in_slices, next_turn
from layerflow.server.planner import PlannedStep, plan_direct, plan_step, step_owner
from layerflow.server.step_check import CheckedStep, check_deadlines, check_step, count_objects
from layerflow.wire import messages as wire

ITEMS_PER_SLICE = 64
"""Items of a Report, lost blocks among them, that are handled before another client may get its turn."""

MOST_MEASURED = 1 << 53
"""Bytes or seconds that one step can have moved or taken: what a float counts exactly."""

log = structlog.get_logger("layerflow.server")


async def open_step(context: ServerContext, session: ClientSession, message: wire.OpenStep) -> None:
    key = (session.number, message.step)
    if context.driver.is_open(key):
        raise ProtocolError(f"step {message.step} is already open")
    limits = context.settings()
    check_deadlines(message, time.monotonic(), limits.max_deadline_s)
    objects = count_objects(message)
    if objects > limits.max_step_objects:
        raise Refused(
            "quota",
            f"step {message.step}: {objects} objects, server.max_step_objects is {limits.max_step_objects}; "
            "move fewer requests in one step",
        )
    if len(session.open_steps) >= limits.max_open_steps:
        raise Refused(
            "quota",
            f"step {message.step}: server.max_open_steps = {limits.max_open_steps} steps of this session are open; "
            "close steps, and report their batches",
        )
    if message.planned and session.direct:
        raise ProtocolError(f"step {message.step}: a worker that moves bytes past the arena has no plans of it")
    assert session.spec is not None
    checked = await in_slices(check_step(session.spec, message))
    if context.draining and not _of_a_handoff(context, session, checked):
        raise Refused("draining", "the server is shutting down")
    asked = sum(session.open_steps.values()) + checked.nbytes
    if asked > limits.max_open_bytes:
        raise Refused(
            "quota",
            f"step {message.step}: this session's open steps would move {asked} bytes, server.max_open_bytes is "
            f"{limits.max_open_bytes}; close steps first",
        )
    try:
        opening = _plan(context, session, message, checked)
    except Exception:
        context.pool.drop_owner(step_owner(session.number, message.step))
        raise
    context.driver.open(key, opening.book)
    if context.recorder.current is not None:
        context.recorder.current.note(StepNote(time.monotonic(), session.number, message))
    session.open_steps[message.step] = checked.nbytes
    # The plan goes first: batches that follow are numbered by it.
    context.send(session, opening.plan)
    try:
        context.driver.handle(*opening.events)
    except InvalidTransition:
        context.driver.discard(key)
        del session.open_steps[message.step]
        raise
    for request, keys in opening.loaded:
        # Only what this worker has pinned itself now: the other ranks' objects are still leased for them.
        owner = lease_owner(session.engine, request)
        context.pool.release(owner, keys)
        context.driver.incoming.drop_lease(owner, keys)
    for request in _last_of(message):
        context.plans.opened(session.engine, request, session.number)
    context.metrics.step_opened(session.labels, full=opening.full, missing=opening.missing)


def step_refused(context: ServerContext, session: ClientSession, message: wire.OpenStep) -> None:
    """A step that was not opened uses its hits' plans up all the same: the worker names them once."""
    requests = _last_of(message)
    if message.planned:
        context.plans.refused(session.engine, requests, session.number, message.step)
        return
    for request in requests:  # it moves nothing before the answer, which says that it never will
        context.plans.opened(session.engine, request, session.number)


def _last_of(message: wire.OpenStep) -> list[str]:
    """Requests whose plans the worker opens no further step with."""
    more = {part.request for part in message.loads if part.more}
    return list({part.request: None for part in message.loads if part.request not in more})


def _plan(context: ServerContext, session: ClientSession, message: wire.OpenStep, checked: CheckedStep) -> PlannedStep:
    if session.direct:
        return plan_direct(session, message, checked)
    return plan_step(
        context.pool,
        context.sources,
        session,
        message=message,
        checked=checked,
        replicas=context.sessions.replicas_of(session),
        unclaimed=context.driver.unclaimed,
        handoffs=context.handoffs,
        incoming=context.driver.incoming,
        follows=context.driver.follows,
    )


def _of_a_handoff(context: ServerContext, session: ClientSession, checked: CheckedStep) -> bool:
    """Does the step save or load what a hand-off is about? A server that is to stop still lets those end."""
    follows = context.driver.follows
    return any(follows.allowed(session.engine, wanted.request) for wanted in checked.loads) or any(
        context.handoffs.concerned(wanted.keys) for wanted, _ in checked.saves
    )


async def report(context: ServerContext, session: ClientSession, message: wire.Report) -> None:
    for failure in message.failed:
        unlogged = context.log_limit.admit(time.monotonic())
        if unlogged is not None:
            log.warning(
                "batch_failed",
                session=session.number,
                batch=failure.batch,
                reason=shortened(failure.reason),
                unlogged=unlogged,
            )
    context.driver.time_batches(session.number, message)
    for moved in message.moved:
        context.plans.moved(session.number, moved.step)
    await tell(context, _events(session.number, message))
    for figures in message.figures:
        if not all(0 <= value < MOST_MEASURED for value in msgspec.structs.astuple(figures)[1:]):
            raise ProtocolError(f"step {figures.step}: {figures} cannot have been measured")
        context.metrics.step_measured(session.labels, figures)
        if figures.load_transfer_s > 0 or figures.load_exposed_s > 0:
            session.figures.loading_steps += 1
            session.figures.load_seconds += figures.load_transfer_s
            session.figures.exposed_load_seconds += figures.load_exposed_s
        context.slow_steps.see(session, figures)
        if context.recorder.current is not None:
            measured = StepMeasured(time.monotonic(), session.number, *msgspec.structs.astuple(figures))
            context.recorder.current.note(measured)


async def tell(context: ServerContext, events: Iterator[Event]) -> None:
    """Tell the core.

    :raises InvalidTransition: the first impossible event; all others were handled.
    """
    refused: InvalidTransition | None = None
    for few in _sliced(events):
        try:
            context.driver.handle(*few)
        except InvalidTransition as error:
            refused = refused or error
        await next_turn()
    if refused is not None:
        raise refused


def _sliced(events: Iterable[Event]) -> Iterator[list[Event]]:
    few: list[Event] = []
    items = 0
    for event in events:
        few.append(event)
        items += 1 + (len(event.failed) if isinstance(event, LoadsLost | LoadsMoved) else 0)
        if items >= ITEMS_PER_SLICE:
            yield few
            few, items = [], 0
    if few:
        yield few


def _events(session: int, report: wire.Report) -> Iterator[Event]:
    """What a Report says, its reasons cut: they are kept while their step is open, and told on."""
    for place in report.progress:
        if place.frontier >= 0:
            yield FrontierReached(session, place.step, place.frontier)
        if place.computed > 0:
            yield LayersComputed(session, place.step, place.computed)
    for batch in report.done:
        yield BatchDone(session, batch)
    for fence in report.fenced:
        yield LoadsFenced(session, fence.step, shortened(fence.reason))
    for failure in report.failed:
        yield BatchFailed(session, failure.batch, shortened(failure.reason))
    for moved in report.moved:
        earlier = 0  # so many are told before the end
        while len(moved.lost) - earlier > ITEMS_PER_SLICE:
            yield LoadsLost(session, moved.step, _failed(moved.lost[earlier : earlier + ITEMS_PER_SLICE]))
            earlier += ITEMS_PER_SLICE
        yield LoadsMoved(session, moved.step, moved.nbytes, _failed(moved.lost[earlier:]), earlier)
    for closed in report.closed:
        yield StepClosed(session, closed.step, closed.ok)


def _failed(lost: Iterable[wire.LostBlocks]) -> tuple[FailedRange, ...]:
    return tuple(FailedRange(each.group, each.lo, each.hi, shortened(each.reason)) for each in lost)

"""The core as one object: a handler for each event; then what follows from it, and what may move now."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

from layerflow.errors import InvalidTransition
from layerflow.flow.arrivals import (
    add_cursors,
    advance_follows,
    check_needs,
    commit_follows,
    expire_fetch,
    extend_fetch,
    fail_fetches,
    fail_incoming,
    fetch_done,
    finalize_incoming_if_done,
    lease_incoming,
    lose_followed,
    open_fetch,
    open_follow,
    rebind_follow,
    release,
    revoke_fetches,
)
from layerflow.flow.commands import Command, Revoke, WakeAt
from layerflow.flow.events import (
    LOAD,
    SAVE,
    BatchDone,
    BatchFailed,
    CallDone,
    Direction,
    Event,
    FetchAvailable,
    FetchesRevoked,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    FrontierReached,
    Hop,
    HostLost,
    IncomingFailed,
    IncomingLeased,
    LayersComputed,
    Limits,
    LimitsChanged,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    Part,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
    StepsRevoked,
    Tick,
    WriteOpened,
    WritesRevoked,
)
from layerflow.flow.graph import (
    OPEN,
    FlowStep,
    IncomingFetch,
    IncomingObjectState,
    JobState,
    PartState,
    Session,
    Transfer,
    TransferJob,
    WriteTransfer,
    open_session,
)
from layerflow.flow.host_lane import HostLane, grant_calls
from layerflow.flow.progress import (
    abort,
    batch_done,
    batch_failed,
    cancel_save_parts,
    cancel_saves,
    cancel_uncomputed,
    check_planned,
    drained,
    fence_loads,
    finalize_step_if_done,
    loads_lost,
    loads_moved,
    lose_session,
    track_worker_driven,
)
from layerflow.flow.scheduler import grant
from layerflow.flow.state import FlowStatistics, State
from layerflow.flow.validate import lives, validate
from layerflow.flow.writes import SHED, follow_save, lose_writes, open_write, revoke_writes, write_done

# A step from its message: checked, then a transfer for each group and direction.


def open_step(state: State, session: Session, event: StepOpened, out: list[Command]) -> None:
    """Add the step; its saves are shed where the session has too much unsaved already.

    :raises InvalidTransition: for a step that is open already, or parts that cannot be.
    """
    if event.step in session.steps:
        raise InvalidTransition(
            f"session {session.number} opened step {event.step} twice; step numbers are not reused while a step lives",
            session.steps[event.step].recent_events(),
        )
    if event.deadline != event.deadline or event.save_deadline != event.save_deadline:
        raise InvalidTransition(f"session {session.number} step {event.step}: a deadline is not a number")
    _check(session, event, event.loads, "load")
    _check_needs(state, session, event)
    check_planned(event)
    _check(session, event, event.saves, "save")

    step = FlowStep(session, event.step, event.deadline, event.save_deadline)
    step.heard(event)
    session.steps[event.step] = step
    if event.loads:
        step.loads = _job(state, step, Direction.LOAD, event.loads, planned=event.planned)
        if event.planned:
            track_worker_driven(state, step.loads)
        else:
            state.enqueue(step.loads)
    if event.saves:
        saves = _job(state, step, Direction.SAVE, event.saves)
        nbytes = sum(transfer.starts[-1] * transfer.shape.tail_bytes[0] for transfer in saves.transfers.values())
        shed: list[int] = []
        if session.unsaved + nbytes > state.budget.limits.save_backlog_bytes:
            shed = [position for position, part in enumerate(event.saves) if not part.awaited]
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
    state: State, step: FlowStep, direction: Direction, parts: tuple[Part, ...], *, planned: bool = False
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
            add_cursors(state, transfer)
        elif not planned:
            transfer.add_cursor([(0, starts[-1])])
    return job


def _propagate(state: State, out: list[Command]) -> None:
    """Carry an event on until nothing changes: a cancelled save may fail a load, and a failed load cancel a save."""
    while (
        state.progressed_saves
        or state.cancelled_saves
        or state.dirty_steps
        or state.committed_saves
        or state.finished_loads
    ):
        # Process cancelled saves first, so that followers are never told of layers that the save has lost; and stored
        # layers before commits, so that followers hear of the last layer before its publication.
        while state.cancelled_saves:
            cancelled, state.cancelled_saves = state.cancelled_saves, []
            for save, parts, reason in cancelled:
                lose_followed(state, save, parts, reason, out)
        for save in state.progressed_saves:
            follow_save(state, save, out)
            advance_follows(state, save, out)
        state.progressed_saves.clear()
        for step in state.dirty_steps:
            finalize_step_if_done(state, step, out)
        state.dirty_steps.clear()
        for save in state.committed_saves:
            commit_follows(state, save, out)
        state.committed_saves.clear()
        _release_finished_loads(state, out)


def _release_finished_loads(state: State, out: list[Command]) -> None:
    """Release the incoming objects of finished loads; later failures of these objects no longer affect the loads."""
    finished, state.finished_loads = state.finished_loads, []
    held = dict.fromkeys(incoming for job in finished for incoming in release(job))
    for incoming in held:
        finalize_incoming_if_done(state, incoming, out)


class Flow:
    """Events in, commands out.

    :param limits: the caps to start with.
    :raises ConfigError: for limits that no transfer could meet.
    """

    __slots__ = ("_handlers", "_now", "_state")

    def __init__(self, limits: Limits) -> None:
        self._state = State(limits)
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any, list[Command]], None]] = {
            SessionOpened: self._session_opened,
            SessionLost: self._session_lost,
            StepOpened: self._step_opened,
            FetchOpened: self._fetch_opened,
            FetchAvailable: self._fetch_available,
            FollowOpened: partial(open_follow, self._state),
            FollowMoved: partial(rebind_follow, self._state),
            IncomingFailed: partial(fail_incoming, self._state),
            IncomingLeased: partial(lease_incoming, self._state),
            WriteOpened: partial(open_write, self._state),
            WritesRevoked: partial(revoke_writes, self._state),
            CallDone: self._call_done,
            FetchesRevoked: partial(revoke_fetches, self._state),
            HostLost: self._host_lost,
            FrontierReached: self._frontier_reached,
            LayersComputed: self._layers_computed,
            BatchDone: partial(batch_done, self._state),
            BatchFailed: partial(batch_failed, self._state),
            LoadsLost: partial(loads_lost, self._state),
            LoadsMoved: partial(loads_moved, self._state),
            LoadsFenced: self._loads_fenced,
            StepClosed: self._step_closed,
            RequestAborted: self._request_aborted,
            StepsRevoked: self._steps_revoked,
            LimitsChanged: self._limits_changed,
            Tick: self._tick,
        }

    @property
    def paused(self) -> bool:
        """Were batches left that may run now? The next event hands them out: a ``Tick``, where there is no other."""
        return self._state.paused

    def handle(self, event: Event, now: float, most: int = sys.maxsize) -> list[Command]:
        """Apply one event.

        :param now: seconds on the caller's monotonic clock; never smaller than in the call before.
        :param most: batches to hand out in this call, where loads are among them; see :attr:`paused`.
        :returns: what to do, in this order.
        :raises InvalidTransition: for an impossible event; nothing has changed then.
        :raises ConfigError: for impossible limits; the old ones stay.
        """
        state = self._state
        self._now = now
        out: list[Command] = []
        self._handlers[type(event)](event, out)
        while (due := state.deadlines.due(now)) is not None:
            if isinstance(due, FlowStep):
                self._expire(due, now, out)
            else:
                expire_fetch(state, due, out)
        if state.progressed_saves or state.dirty_steps or state.finished_loads or state.cancelled_saves:
            _propagate(state, out)
        grant(state, out, most)
        if state.fetches.ring.queue:
            grant_calls(state.fetches, state.budget, now, out)
        if state.peers.ring.queue:
            grant_calls(state.peers, state.budget, now, out)
        if state.writes.ring.queue:
            grant_calls(state.writes, state.budget, now, out)
        if state.forgotten:
            for step in state.forgotten:
                step.dissolve()
            state.forgotten.clear()
        earliest = state.deadlines.earliest()
        if earliest not in (state.wake, math.inf):
            state.wake = earliest
            out.append(WakeAt(earliest))
        return out

    def stored(self, session: int, step: int) -> float:
        """The share of its layers that a step has stored of what it saves, of the group that has least; 0 = none."""
        known = self._state.sessions.get(session)
        found = known.steps.get(step) if known is not None else None
        if found is None or found.saves is None:
            return 0.0
        return min(each.stored() / len(each.shape.layers) for each in found.saves.transfers.values())

    def validate(self) -> None:
        """Check every invariant; for tests, after every event.

        :raises InvalidTransition: naming the broken one, with the step's story.
        """
        validate(self._state)

    def lives(self) -> dict[tuple[object, ...], JobState | PartState | IncomingObjectState]:
        """Where everything that has a life is; see :data:`.PART_LIFE` and its like. Costs O(everything)."""
        return lives(self._state)

    def statistics(self) -> FlowStatistics:
        """A snapshot."""
        state = self._state
        inflight, batches = state.budget.inflight, state.budget.batches
        fetches = sum(isinstance(incoming, IncomingFetch) for incoming in state.incoming.values())
        return FlowStatistics(
            sessions=len(state.sessions),
            steps=sum(len(session.steps) for session in state.sessions.values()),
            load_inflight_bytes=inflight[LOAD],
            save_inflight_bytes=inflight[SAVE],
            load_inflight_batches=batches[LOAD],
            save_inflight_batches=batches[SAVE],
            unsaved_bytes=sum(session.unsaved for session in state.sessions.values()),
            fetches=fetches,
            fetch_inflight_bytes=state.fetches.inflight + state.peers.inflight,
            writes=len(state.writes.transfers),
            write_inflight_bytes=state.writes.inflight,
            write_backlog_bytes=state.writes.backlog,
            following=len(state.incoming) - fetches,
            **asdict(state.counters),
        )

    def _session_opened(self, event: SessionOpened, _: list[Command]) -> None:
        if event.session in self._state.sessions:
            raise InvalidTransition(f"session {event.session} was opened twice; its number is in use")
        self._state.sessions[event.session] = open_session(event)
        self._state.budget.sessions += 1
        self._state.newest_session = max(self._state.newest_session, event.session)

    def _session_lost(self, event: SessionLost, out: list[Command]) -> None:
        session = self._state.session(event.session)
        if session is not None:
            lose_session(self._state, session, out)
            # Before its own saves are given up: its own loads may have waited for them.
            _release_finished_loads(self._state, out)

    def _step_opened(self, event: StepOpened, out: list[Command]) -> None:
        session = self._state.session(event.session)
        if session is not None:
            open_step(self._state, session, event, out)

    def _fetch_opened(self, event: FetchOpened, _: list[Command]) -> None:
        open_fetch(self._state, event, self._now)

    def _fetch_available(self, event: FetchAvailable, _: list[Command]) -> None:
        extend_fetch(self._state, event, self._now)

    def _call_done(self, event: CallDone, out: list[Command]) -> None:
        state = self._state
        lane: HostLane[IncomingFetch] | HostLane[WriteTransfer]
        lane = state.writes if event.hop is Hop.WRITE else state.lane_of(event.hop)
        taken = lane.take(event, self._now)
        if taken is None:
            state.counters.late_reports += 1
            return
        transfer, call, failed = taken
        if isinstance(transfer, IncomingFetch):
            fetch_done(state, transfer, call, failed, now=self._now, out=out)
        else:
            write_done(state, transfer, call, failed, out)

    def _host_lost(self, event: HostLost, out: list[Command]) -> None:
        for hop in event.hops:
            if hop is Hop.WRITE:
                lose_writes(self._state, event.reason, out)
            else:
                fail_fetches(self._state, self._state.lane_of(hop), event.reason, out)

    def _frontier_reached(self, event: FrontierReached, _: list[Command]) -> None:
        step = self._state.step(event, event.session, event.step)
        if step is None:
            return
        if not 0 <= event.layer < step.session.num_layers:
            raise step.impossible(f"reached layer {event.layer}, which it does not have")
        self._advance(step, event.layer)

    def _layers_computed(self, event: LayersComputed, _: list[Command]) -> None:
        step = self._state.step(event, event.session, event.step)
        if step is None:
            return
        if not 0 <= event.count <= step.session.num_layers:
            raise step.impossible(f"computed {event.count} layers, which it does not have")
        self._computed(step, event.count)

    def _computed(self, step: FlowStep, count: int) -> None:
        if count > step.computed:
            step.computed = count
            if step.saves is not None:
                self._state.budget.open_gates(step.saves)
                head = step.saves.head()
                if head is not None and head.layer < count:
                    self._state.permit(step.session, SAVE)
        self._advance(step, count - 1)

    def _advance(self, step: FlowStep, layer: int) -> None:
        if layer <= step.frontier:
            return
        step.frontier = layer
        if step.loads is not None:
            self._state.budget.open_gates(step.loads)
            if step.loads.cursors and step.loads.head() is not None:
                self._state.rings[LOAD].join(step.session)

    def _loads_fenced(self, event: LoadsFenced, out: list[Command]) -> None:
        step = self._state.step(event, event.session, event.step)
        if step is None:
            return
        if step.loads is None or step.loads.state is not OPEN:
            self._state.counters.late_reports += 1
            return
        fence_loads(self._state, step.loads, event.reason, out, cancel=False)

    def _step_closed(self, event: StepClosed, out: list[Command]) -> None:
        state = self._state
        step = state.step(event, event.session, event.step)
        if step is None:
            return
        if event.ok:
            self._computed(step, step.session.num_layers)
        else:
            reason = "the forward pass did not finish"
            if step.loads is not None and step.loads.state is OPEN:
                fence_loads(state, step.loads, reason, out, cancel=True)
            if step.saves is not None and step.saves.state is OPEN:
                cancel_uncomputed(state, step.saves, reason, out)
        step.closed = True
        state.dirty_steps.append(step)

    def _request_aborted(self, event: RequestAborted, out: list[Command]) -> None:
        session = self._state.session(event.session)
        if session is None:
            return
        pending = session.aborting.get(event.request)
        self._state.counters.aborted_requests += pending is None
        barrier = abort(self._state, session.steps.values(), event.request, out)
        if pending is not None:
            pending.release = None  # said once, and only when what was opened since is quiet too
        if barrier.pending:
            session.aborting[event.request] = barrier
        else:
            drained(self._state, session, barrier, out)

    def _steps_revoked(self, event: StepsRevoked, out: list[Command]) -> None:
        state = self._state
        session = state.session(event.session)
        for step in list(session.steps.values()) if session is not None else ():
            loads, saves = step.loads, step.saves
            if event.loads and loads is not None and loads.state is OPEN:
                fence_loads(state, loads, event.reason, out, cancel=True)
            if saves is not None and saves.state is OPEN:
                cancel_saves(state, saves, event.reason, out)
            state.dirty_steps.append(step)

    def _limits_changed(self, event: LimitsChanged, _: list[Command]) -> None:
        state = self._state
        state.change_limits(event.limits)
        for session in state.sessions.values():
            for ring, pending in zip(state.rings, session.pending, strict=True):
                if pending:
                    ring.join(session)

    def _tick(self, _: Tick, __: list[Command]) -> None:
        """Only time passed."""

    def _expire(self, step: FlowStep, now: float, out: list[Command]) -> None:
        state, reason = self._state, "deadline"
        loads, saves = step.loads, step.saves
        if loads is not None and loads.state is OPEN and now >= step.deadline:
            state.counters.expired_jobs += 1
            fence_loads(state, loads, reason, out, cancel=True)
        if saves is not None and saves.state is OPEN and now >= step.save_deadline:
            state.counters.expired_jobs += 1
            cancel_saves(state, saves, reason, out)
        if now >= max(step.deadline, step.save_deadline):
            step.closed = True
        state.dirty_steps.append(step)

"""The core as one object: a handler for each event; then what follows from it, and what may move now."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from layerflow.errors import InvalidTransition
from layerflow.flow.arrivals.edges import release_edges
from layerflow.flow.arrivals.fetches import (
    expire_fetch,
    fail_fetch,
    fetch_done,
    lease_fetch,
    lose_fetches,
    open_fetch,
    raise_fetch,
    revoke_fetches,
    settle_fetch,
)
from layerflow.flow.arrivals.follows import (
    advance_follows,
    commit_follows,
    lend_follow,
    lose_follow,
    lose_followed,
    move_follow,
    open_follow,
    settle_follow,
)
from layerflow.flow.commands import Command, WakeAt
from layerflow.flow.events import (
    LOAD,
    SAVE,
    BatchDone,
    BatchFailed,
    Event,
    FollowLent,
    FollowLost,
    FollowMoved,
    FollowOpened,
    FrontierReached,
    LayersComputed,
    LimitsChanged,
    LoadsFenced,
    LoadsMoved,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
    StepsRevoked,
    Tick,
)
from layerflow.flow.graph.fetch import FetchTransfer
from layerflow.flow.graph.follow import FollowTransfer
from layerflow.flow.graph.session import open_session
from layerflow.flow.graph.step import Step
from layerflow.flow.graph.write import WriteTransfer
from layerflow.flow.host_events import (
    CallDone,
    FetchAvailable,
    FetchesRevoked,
    FetchFailed,
    FetchLeased,
    FetchOpened,
    Hop,
    HostLost,
    WriteOpened,
    WritesRevoked,
)
from layerflow.flow.host_lane import HostLane, grant_calls
from layerflow.flow.limits import Limits
from layerflow.flow.opening import open_step
from layerflow.flow.progress.completion import abort, cancel_saves, cancel_uncomputed, drained, fence_loads, settle
from layerflow.flow.progress.planned import loads_moved
from layerflow.flow.progress.reports import batch_done, batch_failed, lose_session
from layerflow.flow.progress.writes import follow_save, lose_writes, open_write, revoke_writes, write_done
from layerflow.flow.scheduler import grant
from layerflow.flow.state import FlowStatistics, State
from layerflow.flow.validate.steps import validate


def _conclude(state: State, out: list[Command]) -> None:
    """What follows from an event, until nothing more does: a save that is given up may fail a load, and that a save."""
    while state.advanced or state.severed or state.unsettled or state.committed or state.loosened:
        # What is given up counts as stored no more: nobody is told of layers that it does not have. What is stored is
        # told of before the commit that follows from the last of it.
        while state.severed:
            severed, state.severed = state.severed, []
            for save, parts, reason in severed:
                lose_followed(state, save, parts, reason, out)
        for save in state.advanced:
            follow_save(state, save, out)
            advance_follows(state, save, out)
        state.advanced.clear()
        for step in state.unsettled:
            settle(state, step, out)
        state.unsettled.clear()
        for save in state.committed:
            commit_follows(state, save, out)
        state.committed.clear()
        _loosen(state, out)


def _loosen(state: State, out: list[Command]) -> None:
    """Loads that are over hold nothing any more, and nothing that happens to what they held concerns them."""
    loosened, state.loosened = state.loosened, []
    held = dict.fromkeys(upstream for job in loosened for upstream in release_edges(job))
    for upstream in held:
        if isinstance(upstream, FetchTransfer):
            settle_fetch(state, upstream, out)
        elif isinstance(upstream, FollowTransfer):
            settle_follow(state, upstream, out)


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
            FetchFailed: partial(fail_fetch, self._state),
            FetchLeased: partial(lease_fetch, self._state),
            FollowOpened: partial(open_follow, self._state),
            FollowLent: partial(lend_follow, self._state),
            FollowMoved: partial(move_follow, self._state),
            FollowLost: partial(lose_follow, self._state),
            WriteOpened: partial(open_write, self._state),
            WritesRevoked: partial(revoke_writes, self._state),
            CallDone: self._call_done,
            FetchesRevoked: partial(revoke_fetches, self._state),
            HostLost: self._host_lost,
            FrontierReached: self._frontier_reached,
            LayersComputed: self._layers_computed,
            BatchDone: partial(batch_done, self._state),
            BatchFailed: partial(batch_failed, self._state),
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
            if isinstance(due, Step):
                self._expire(due, now, out)
            else:
                expire_fetch(state, due, out)
        if state.advanced or state.unsettled or state.loosened or state.severed:
            _conclude(state, out)
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

    def statistics(self) -> FlowStatistics:
        """A snapshot."""
        state = self._state
        inflight, batches = state.budget.inflight, state.budget.batches
        return FlowStatistics(
            sessions=len(state.sessions),
            steps=sum(len(session.steps) for session in state.sessions.values()),
            load_inflight_bytes=inflight[LOAD],
            save_inflight_bytes=inflight[SAVE],
            load_inflight_batches=batches[LOAD],
            save_inflight_batches=batches[SAVE],
            unsaved_bytes=sum(session.unsaved for session in state.sessions.values()),
            fetches=len(state.fetches.transfers) + len(state.peers.transfers),
            fetch_inflight_bytes=state.fetches.inflight + state.peers.inflight,
            writes=len(state.writes.transfers),
            write_inflight_bytes=state.writes.inflight,
            write_backlog_bytes=state.writes.backlog,
            following=len(state.follows),
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
            _loosen(self._state, out)  # before its own saves are given up, which its own loads may have waited for

    def _step_opened(self, event: StepOpened, out: list[Command]) -> None:
        session = self._state.session(event.session)
        if session is not None:
            open_step(self._state, session, event, out)

    def _fetch_opened(self, event: FetchOpened, _: list[Command]) -> None:
        open_fetch(self._state, event, self._now)

    def _fetch_available(self, event: FetchAvailable, _: list[Command]) -> None:
        raise_fetch(self._state, event, self._now)

    def _call_done(self, event: CallDone, out: list[Command]) -> None:
        state = self._state
        lane: HostLane[FetchTransfer] | HostLane[WriteTransfer]
        lane = state.writes if event.hop is Hop.WRITE else state.lane_of(event.hop)
        taken = lane.take(event, self._now)
        if taken is None:
            state.counters.late_reports += 1
            return
        transfer, call, failed = taken
        if isinstance(transfer, FetchTransfer):
            fetch_done(state, transfer, call, failed, self._now, out)
        else:
            write_done(state, transfer, call, failed, out)

    def _host_lost(self, event: HostLost, out: list[Command]) -> None:
        for hop in event.hops:
            if hop is Hop.WRITE:
                lose_writes(self._state, event.reason, out)
            else:
                lose_fetches(self._state, self._state.lane_of(hop), event.reason, out)

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

    def _computed(self, step: Step, count: int) -> None:
        if count > step.computed:
            step.computed = count
            if step.saves is not None:
                self._state.budget.open_gates(step.saves)
                head = step.saves.head()
                if head is not None and head.layer < count:
                    self._state.permit(step.session, SAVE)
        self._advance(step, count - 1)

    def _advance(self, step: Step, layer: int) -> None:
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
        if step.loads is None or step.loads.done or step.loads.cancelled:
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
            if step.loads is not None and not step.loads.done and not step.loads.cancelled:
                fence_loads(state, step.loads, reason, out, cancel=True)
            if step.saves is not None and step.saves.open and not step.saves.cancelled:
                cancel_uncomputed(state, step.saves, reason, out)
        step.closed = True
        state.unsettled.append(step)

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
            if event.loads and loads is not None and not loads.done and not loads.cancelled:
                fence_loads(state, loads, event.reason, out, cancel=True)
            if saves is not None and saves.open and not saves.cancelled:
                cancel_saves(state, saves, event.reason, out)
            state.unsettled.append(step)

    def _limits_changed(self, event: LimitsChanged, _: list[Command]) -> None:
        state = self._state
        state.change_limits(event.limits)
        for session in state.sessions.values():
            for ring, pending in zip(state.rings, session.pending, strict=True):
                if pending:
                    ring.join(session)

    def _tick(self, _: Tick, __: list[Command]) -> None:
        """Only time passed."""

    def _expire(self, step: Step, now: float, out: list[Command]) -> None:
        state, reason = self._state, "deadline"
        loads, saves = step.loads, step.saves
        if loads is not None and not loads.done and not loads.cancelled and now >= step.deadline:
            state.counters.expired_jobs += 1
            fence_loads(state, loads, reason, out, cancel=True)
        if saves is not None and saves.open and not saves.cancelled and now >= step.save_deadline:
            state.counters.expired_jobs += 1
            cancel_saves(state, saves, reason, out)
        if now >= max(step.deadline, step.save_deadline):
            step.closed = True
        state.unsettled.append(step)

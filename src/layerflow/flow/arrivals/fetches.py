"""Fetches: objects on their way from the backend or a peer into the arena, and the loads that hang on them.

An object is published once all its layers have come. One that fails fails the blocks that need it, and no
others. A fetch ends when all its objects have come or failed, or when it was wanted and no longer is: then
what is in flight is awaited, and what is wanted again meanwhile goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.arrivals.edges import add_edge, fail_waiting, progress, publish, vacate
from layerflow.flow.commands import Call, Command, ObjectsLost, TransferDone
from layerflow.flow.events import Part
from layerflow.flow.graph.cursor import Span, joined
from layerflow.flow.graph.edge import Upstream
from layerflow.flow.graph.fetch import FetchTransfer, fetch_of
from layerflow.flow.graph.follow import FollowTransfer
from layerflow.flow.graph.step import Transfer
from layerflow.flow.host_events import FetchAvailable, FetchesRevoked, FetchFailed, FetchLeased, FetchOpened, Hop
from layerflow.flow.host_lane import HostLane
from layerflow.flow.state import State

UNWANTED = ""


def open_fetch(state: State, event: FetchOpened, now: float) -> None:
    """Begin.

    :raises InvalidTransition: for a number that was used, or objects that cannot be.
    """
    if event.fetch <= state.newest_fetch:
        raise InvalidTransition(f"fetch {event.fetch} was opened after fetch {state.newest_fetch}; numbers ascend")
    if event.hop is Hop.WRITE:
        raise InvalidTransition(f"fetch {event.fetch} cannot come by the way to the backend")
    if not event.layers or not event.objects or any(min(item) < 1 for item in event.objects):
        raise InvalidTransition(f"fetch {event.fetch} has no layers, no objects, or an object without bytes or blocks")
    available = len(event.layers) if event.available < 0 else event.available
    if available > len(event.layers):
        raise InvalidTransition(f"fetch {event.fetch}: {available} layers are available of {len(event.layers)}")
    lane = state.lane_of(event.hop)
    fetch = fetch_of(event, lane.source(event.source), available)
    lane.add(fetch)
    _set_deadline(state, fetch, now)


def raise_fetch(state: State, event: FetchAvailable, now: float) -> None:
    """Its source has stored more of it.

    :raises InvalidTransition: for a fetch that was never opened, or layers that it does not have.
    """
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    if not 0 <= event.layers <= fetch.layers:
        raise InvalidTransition(f"fetch {event.fetch}: {event.layers} layers are available of {fetch.layers}")
    if event.layers > fetch.limit:
        fetch.limit = event.layers
        _set_deadline(state, fetch, now)
        state.lane_of(fetch.hop).join(fetch)


def fail_fetch(state: State, event: FetchFailed, out: list[Command]) -> None:
    """Some of its objects will not come. What the host is doing with them is awaited.

    :raises InvalidTransition: for a fetch that was never opened, or objects that it does not have.
    """
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    if any(not 0 <= index < len(fetch.objects) for index, _ in event.failed):
        raise InvalidTransition(f"fetch {event.fetch} does not have objects {event.failed[:3]}")
    for reason, lost in fetch.fresh(event.failed).items():
        _lose(state, fetch, lost, reason, out)
    settle_fetch(state, fetch, out)


def _living(state: State, number: int) -> FetchTransfer | None:
    """A fetch that is not over; None = it is, and this news of it is late."""
    fetch = state.fetch(number)
    if fetch is None or fetch.closed:
        if number > state.newest_fetch:
            raise InvalidTransition(f"fetch {number} was never opened")
        state.counters.late_reports += 1
        return None
    return fetch


def _set_deadline(state: State, fetch: FetchTransfer, now: float) -> None:
    """It is given up if nothing comes of it; while it waits for its source, the steps that need it have deadlines."""
    stuck = len(fetch.lost) + len(fetch.whole) < len(fetch.objects) and not fetch.stalled
    state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s if stuck else math.inf)


def lease_fetch(state: State, event: FetchLeased, out: list[Command]) -> None:
    """Lookups lease it, or no longer do."""
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    fetch.leased = event.leased
    fetch.claimed = fetch.claimed or event.leased
    state.lane_of(fetch.hop).join(fetch)
    settle_fetch(state, fetch, out)


def check_needs(state: State, part: Part, layers: tuple[int, ...]) -> str:
    """What is wrong with what a load part needs; empty = nothing.

    :param layers: of the part's group.
    """
    end = 0
    for need in part.needs:
        fetch = state.upstream(need.fetch)
        if fetch is None or fetch.closed or not 0 <= need.item < fetch.size:
            return f"needs object {need.item} of fetch {need.fetch}, which is not on its way"
        if fetch.numbers != layers:
            return f"needs fetch {need.fetch}, which has other layers than its group"
        if need.item in fetch.lost or need.item in fetch.whole or need.item in _moved(fetch):
            return f"needs object {need.item} of fetch {need.fetch}, which has come or failed"
        if not end <= need.lo < need.hi <= part.blocks:
            return f"needs blocks {need.lo} to {need.hi} of {part.blocks}, after block {end}"
        end = need.hi
    return ""


def lay_out(state: State, transfer: Transfer) -> None:
    """One cursor for the blocks that are in the arena, and one for each fetch."""
    ready: list[Span] = []
    needs: dict[int, dict[int, list[Span]]] = {}
    for member, position in enumerate(transfer.members):
        at, end = transfer.starts[member], transfer.starts[member + 1]
        base = at
        for need in transfer.job.parts[position].needs:
            if at < base + need.lo:
                ready.append((at, base + need.lo))
            at = base + need.hi
            needs.setdefault(need.fetch, {}).setdefault(need.item, []).append((base + need.lo, at))
        if at < end:
            ready.append((at, end))
    if ready:
        transfer.add_cursor(joined(ready))
    for number, spans in needs.items():
        upstream = state.upstream(number)
        assert upstream is not None
        add_edge(state, upstream, transfer, spans)
        if isinstance(upstream, FetchTransfer):
            upstream.claimed = True
            state.lane_of(upstream.hop).join(upstream)


def fetch_done(
    state: State, fetch: FetchTransfer, call: Call, failed: dict[str, list[int]], now: float, out: list[Command]
) -> None:
    """The host has ended a call, and failed objects for these reasons."""
    for reason, lost in failed.items():
        _lose(state, fetch, lost, reason, out)
    moved = fetch.carried(call)
    if moved:
        state.counters.fetched_bytes += sum(fetch.objects[index].layer_bytes for index in moved) * (
            call.layer_hi - call.layer_lo
        )
        _set_deadline(state, fetch, now)
    come = [index for index in moved if index not in fetch.whole and fetch.reached((index,)) == fetch.layers]
    state.counters.fetched_objects += len(come)
    publish(fetch, come, out)
    for edge in fetch.edges:
        progress(state, edge)
    settle_fetch(state, fetch, out)


def lose_fetches(state: State, lane: HostLane[FetchTransfer], reason: str, out: list[Command]) -> None:
    """The host is dead: nothing of any of its fetches moves any more."""
    for fetch in list(lane.transfers.values()):
        fetch.calls.clear()
        _lose(state, fetch, fetch.unfinished(), reason, out)
        settle_fetch(state, fetch, out)
    lane.lost()


def revoke_fetches(state: State, event: FetchesRevoked, out: list[Command]) -> None:
    """What has not come is given up. It can be fetched again once the host has ended its calls."""
    reason = event.reason
    for fetch in [*state.fetches.transfers.values(), *state.peers.transfers.values()]:
        if event.unwanted and (fetch.leased or any(not edge.transfer.job.cancelled for edge in fetch.edges)):
            continue
        _lose(state, fetch, fetch.unfinished(), reason, out)
        settle_fetch(state, fetch, out)


def expire_fetch(state: State, fetch: FetchTransfer, out: list[Command]) -> None:
    """Nothing has come of it for too long."""
    state.counters.expired_fetches += 1
    timeout = state.budget.limits.fetch_timeout_s
    _lose(state, fetch, fetch.unfinished(), f"nothing of it came for {timeout:g} s", out)
    settle_fetch(state, fetch, out)


def settle_fetch(state: State, fetch: FetchTransfer, out: list[Command]) -> None:
    """Say what has become true of a fetch, and forget it when nothing is left."""
    lane = state.lane_of(fetch.hop)
    if not fetch.closed and not fetch.wanted and not fetch.calls:
        _lose(state, fetch, fetch.unfinished(), UNWANTED, out)
    if not fetch.calls:
        vacate(fetch, out)
    over = not fetch.calls and len(fetch.lost) + len(fetch.whole) == len(fetch.objects)
    if over and not fetch.closed:
        fetch.closed = True
        state.deadlines.set(fetch, math.inf)
        lane.remove(fetch)
        out.append(TransferDone(fetch.hop, fetch.number))
    if fetch.closed and not fetch.occupied:
        lane.transfers.pop(fetch.number, None)


def _lose(state: State, fetch: FetchTransfer, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """These will not come: the blocks that need them fail, for whoever waits."""
    if not objects:
        return
    fetch.lose(objects)
    out.append(ObjectsLost(fetch.hop, fetch.number, tuple(objects), reason))
    fail_waiting(state, fetch, objects, f"not fetched: {reason}", out)


def _moved(upstream: Upstream) -> Collection[int]:
    return upstream.moved if isinstance(upstream, FollowTransfer) else ()

"""Fetches: objects on their way from the backend or a peer into the arena, and the loads that hang on them.

An object is published once all its layers have come. One that fails fails the blocks that need it, and no
others. A fetch ends when all its objects have come or failed, or when it was wanted and no longer is: then
what is in flight is awaited, and what is wanted again meanwhile goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Arrived, Call, Command, ObjectsLost, TransferDone, Vacate
from layerflow.flow.completion import fail_blocks
from layerflow.flow.events import (
    FetchAvailable,
    FetchesRevoked,
    FetchFailed,
    FetchLeased,
    FetchOpened,
    Hop,
    Part,
)
from layerflow.flow.graph.cursor import Span, joined
from layerflow.flow.graph.fetch import Edge, FetchTransfer, fetch_of
from layerflow.flow.graph.step import Transfer, TransferJob
from layerflow.flow.hosts.lane import HostLane
from layerflow.flow.state import State

UNWANTED = ""


def open_fetch(state: State, event: FetchOpened, now: float) -> None:
    """Begin.

    :raises InvalidTransition: for a number that was used, or objects that cannot be.
    """
    lane, newest = state.lane_of(event.hop), max(state.fetches.newest, state.peers.newest)
    if event.fetch <= newest:
        raise InvalidTransition(f"fetch {event.fetch} was opened after fetch {newest}; numbers ascend")
    if event.hop is Hop.WRITE or not -1 <= event.available <= len(event.layers):
        raise InvalidTransition(f"fetch {event.fetch}: hop {event.hop.name}, {event.available} layers available")
    if not event.layers or not event.objects or any(min(item) < 1 for item in event.objects):
        raise InvalidTransition(f"fetch {event.fetch} has no layers, no objects, or an object without bytes or blocks")
    fetch = fetch_of(event, lane.source(event.source))
    lane.add(fetch)
    state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s)


def lease_fetch(state: State, event: FetchLeased, out: list[Command]) -> None:
    """Lookups lease it, or no longer do."""
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    fetch.leased = event.leased
    fetch.claimed = fetch.claimed or event.leased
    state.lane_of(fetch.hop).join(fetch)
    settle_fetch(state, fetch, out)


def raise_fetch(state: State, event: FetchAvailable, now: float) -> None:
    """More layers of it are stored where it comes from.

    :raises InvalidTransition: for layers that it does not have, or fewer than before.
    """
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    if not fetch.limit <= event.layers <= fetch.layers:
        raise InvalidTransition(f"fetch {event.fetch}: {event.layers} layers available, after {fetch.limit}")
    if event.layers > fetch.limit:
        fetch.limit = event.layers
        state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s)
        state.lane_of(fetch.hop).join(fetch)


def fail_fetch(state: State, event: FetchFailed, out: list[Command]) -> None:
    """Some of its objects will not come. What the host is doing with them is awaited.

    :raises InvalidTransition: for objects that it does not have.
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
        state.counters.late_reports += 1
        return None
    return fetch


def check_needs(state: State, part: Part, layers: tuple[int, ...]) -> str:
    """What is wrong with what a load part needs; empty = nothing.

    :param layers: of the part's group.
    """
    end = 0
    for need in part.needs:
        fetch = state.fetches.transfers.get(need.fetch) or state.peers.transfers.get(need.fetch)
        if fetch is None or fetch.closed or not 0 <= need.item < len(fetch.objects):
            return f"needs object {need.item} of fetch {need.fetch}, which is not on its way"
        if fetch.numbers != layers:
            return f"needs fetch {need.fetch}, which has other layers than its group"
        if need.item in fetch.lost or need.item in fetch.whole:
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
        fetch = state.fetch(number)
        assert fetch is not None
        transfer.add_cursor(joined(span for mine in spans.values() for span in mine), number)
        edge = Edge(fetch, transfer, spans, sorted(spans))
        fetch.edges.append(edge)
        fetch.claimed = True
        transfer.job.edges.append(edge)
        state.lane_of(fetch.hop).join(fetch)
        _progress(state, edge)


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
        if len(fetch.lost) + len(fetch.whole) < len(fetch.objects):
            state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s)
    come = [index for index in moved if index not in fetch.whole and fetch.reached((index,)) == fetch.layers]
    _publish(state, fetch, come, out)
    for edge in fetch.edges:
        _progress(state, edge)
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


def release_edges(state: State, job: TransferJob, out: list[Command]) -> None:
    """The job's loads are done: it holds no fetch any more."""
    edges, job.edges = job.edges, []
    for edge in edges:
        edge.fetch.edges.remove(edge)
    for fetch in dict.fromkeys(edge.fetch for edge in edges):
        settle_fetch(state, fetch, out)


def settle_fetch(state: State, fetch: FetchTransfer, out: list[Command]) -> None:
    """Say what has become true of a fetch, and forget it when nothing is left."""
    lane = state.lane_of(fetch.hop)
    if not fetch.closed and not fetch.wanted and not fetch.calls:
        _lose(state, fetch, fetch.unfinished(), UNWANTED, out)
    _vacate(fetch, out)
    over = not fetch.calls and len(fetch.lost) + len(fetch.whole) == len(fetch.objects)
    if over and not fetch.closed:
        fetch.closed = True
        state.deadlines.set(fetch, math.inf)
        lane.remove(fetch)
        out.append(TransferDone(fetch.hop, fetch.number))
    if fetch.closed and not fetch.occupied:
        lane.transfers.pop(fetch.number, None)


def _vacate(fetch: FetchTransfer, out: list[Command]) -> None:
    if not fetch.occupied or fetch.calls:
        return
    held = {index for edge in fetch.edges for index in edge.spans}
    free = sorted(fetch.occupied - held)
    if free:
        fetch.occupied.difference_update(free)
        out.append(Vacate(fetch.number, tuple(free), fetch.hop))


def _publish(state: State, fetch: FetchTransfer, objects: Sequence[int], out: list[Command]) -> None:
    if not objects:
        return
    fetch.whole.update(objects)
    state.counters.fetched_objects += len(objects)
    readers: list[tuple[int, int, tuple[int, ...]]] = []
    for edge in fetch.edges:
        mine = tuple(index for index in objects if index in edge.spans)
        if mine:
            step = edge.transfer.job.step
            readers.append((step.session.number, step.number, mine))
    out.append(Arrived(fetch.number, tuple(objects), tuple(readers), fetch.hop))


def _lose(state: State, fetch: FetchTransfer, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """These will not come: the blocks that need them fail, for whoever waits."""
    if not objects:
        return
    fetch.lose(objects)
    out.append(ObjectsLost(fetch.hop, fetch.number, tuple(objects), reason))
    gone = set(objects)
    for edge in list(fetch.edges):
        lost = [index for index in edge.waiting if index in gone]
        if lost:
            edge.waiting = [index for index in edge.waiting if index not in gone]
            spans = joined(span for index in lost for span in edge.spans[index])
            fail_blocks(state, edge.transfer, spans, f"not fetched: {reason}", out)
            _progress(state, edge)


def _progress(state: State, edge: Edge) -> None:
    """Layers that have come may be granted."""
    transfer, fetch = edge.transfer, edge.fetch
    if not edge.waiting:
        return
    layers = fetch.reached(edge.waiting)
    if layers <= transfer.arrivals[fetch.number]:
        return
    transfer.arrivals[fetch.number] = layers
    if layers == fetch.layers:
        edge.waiting = []
    cursor = transfer.arriving(fetch.number)
    if cursor is None:
        return
    cursor.permit(layers)
    if cursor.fresh:
        transfer.merge(cursor)
    state.enqueue(transfer.job)

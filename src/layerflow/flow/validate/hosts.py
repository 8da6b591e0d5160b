"""The invariants of what moves between arena and backend, and of the loads that wait for it."""

from __future__ import annotations

import math

from layerflow.errors import InvalidTransition
from layerflow.flow.graph.fetch import FetchTransfer
from layerflow.flow.graph.host_transfer import HostTransfer
from layerflow.flow.graph.write import WriteTransfer
from layerflow.flow.host_lane import HostLane, T
from layerflow.flow.state import State


def validate_fetches(state: State) -> None:
    """Raise for the first invariant of the way into the arena that does not hold.

    :raises InvalidTransition: naming it.
    """
    for lane in (state.fetches, state.peers):
        _lane(state, lane)
        for fetch in lane.transfers.values():
            _require(fetch.hop is lane.hop, fetch, "is in the lane of another hop")
            _fetch(fetch)


def validate_writes(state: State) -> None:
    """The same of the way to the backend.

    :raises InvalidTransition: naming it.
    """
    lane = state.writes
    _lane(state, lane)
    for write in lane.transfers.values():
        _write(write)
    begun = sum(write.nbytes for write in lane.transfers.values() if write.begun)
    if begun != lane.backlog:
        raise InvalidTransition(f"{lane.backlog} bytes of backlog are booked, of {begun}")


def _lane(state: State, lane: HostLane[T]) -> None:
    calls = {number: call for one in lane.transfers.values() for number, call in one.calls.items()}
    if calls.keys() != lane.calls.keys() or lane.inflight != sum(call.nbytes for call in calls.values()):
        raise InvalidTransition(f"{lane.hop.name}: {lane.inflight} bytes in calls {lane.calls.keys()}, not {calls}")
    for number, transfer in lane.transfers.items():
        _require(transfer.number == number, transfer, "is not where its lane keeps it")
        _common(transfer)
        mine = transfer.source.transfers.get(number) is transfer
        _require(mine != transfer.closed, transfer, "is with its source exactly until it is closed")
        _require(
            not transfer.permitted or transfer.closed or transfer.source.queued[lane.hop],
            transfer,
            "has permitted work and is not queued",
        )
    for source in lane.sources.values():
        if not source.transfers or lane.sources[source.name] is not source:
            raise InvalidTransition(f"{lane.hop.name}: source {source.name} is kept without a transfer")
    if lane.ring.queue:
        ready = (source.next_transfer() for source in lane.ring.queue)
        first = next((one for one in ready if one is not None), None)
        if first is not None:
            limits = state.budget.limits
            extent = first.next_extent(limits.max_transfer_blocks, lane.most_bytes(first, state.budget))
            _require(not lane.fits(extent.nbytes, state.budget), first, f"idles although {extent} may move")


def _require(holds: bool, transfer: HostTransfer, what: str) -> None:
    if not holds:
        raise InvalidTransition(f"{transfer.hop.name} {transfer.number}: {what}")


def _common(transfer: HostTransfer) -> None:
    lost, whole, everything = transfer.lost, transfer.whole, set(range(len(transfer.objects)))
    _require(not lost & whole and lost | whole <= everything, transfer, "has objects that are lost and whole")
    live = [item for index, item in enumerate(transfer.objects) if index not in lost]
    sums = (sum(item.layer_bytes for item in live), sum(item.blocks for item in live))
    _require(sums == (transfer.layer_bytes, transfer.layer_blocks), transfer, "miscounts its live objects")
    over = not transfer.calls and lost | whole == everything
    _require(transfer.closed == over, transfer, "is closed exactly when all is over")
    _require(0 <= transfer.index <= transfer.limit <= transfer.layers, transfer, "is past what may move")


def _fetch(fetch: FetchTransfer) -> None:
    _require(fetch.occupied <= fetch.lost, fetch, "keeps room that it has not lost")
    _require(not fetch.closed or bool(fetch.occupied), fetch, "is over and was not forgotten")
    _require(fetch.wanted or bool(fetch.calls) or fetch.closed, fetch, "is not wanted and was not ended")
    for index in set(range(len(fetch.objects))) - fetch.lost:
        _require((fetch.reached((index,)) == fetch.layers) == (index in fetch.whole), fetch, "hides an object")
    _require(not fetch.closed or fetch.alarm == math.inf, fetch, "has a deadline and is over")
    held = {index for edge in fetch.edges for index in edge.spans}
    _require(bool(fetch.calls) or fetch.occupied <= held, fetch, "keeps room that nothing touches")
    for edge in fetch.edges:
        job = edge.transfer.job
        _require(edge in job.edges and not job.done, fetch, f"is held by loads of step {job.step.number} that ended")
        _require(not fetch.lost & set(edge.waiting), fetch, "is waited for where it is lost")


def _write(write: WriteTransfer) -> None:
    _require(not write.closed, write, "is over and was not forgotten")
    _require(write.begun or not (write.limit or write.calls), write, "moves before it has begun")
    following = write.save is not None or not write.unfinished()
    _require(following or write.limit == write.layers, write, "follows no save and waits for layers")
    _require(write.save is None or write.save.write is write, write, "is unknown to the save that it follows")
    _require(not write.publishing or (write.save is None and write.index == write.layers), write, "publishes too early")

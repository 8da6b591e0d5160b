"""The invariants of what moves between arena and backend, and of the loads that wait for it."""

from __future__ import annotations

import math

from layerflow.errors import InvalidTransition
from layerflow.flow.graph.host_transfer import HostTransfer
from layerflow.flow.hosts.lane import HostLane
from layerflow.flow.state import State


def validate_lane(state: State, lane: HostLane) -> None:
    """Raise for the first invariant of one hop that does not hold.

    :raises InvalidTransition: naming it.
    """
    calls = {number: call for one in lane.transfers.values() for number, call in one.calls.items()}
    if calls.keys() != lane.calls.keys() or lane.inflight != sum(call.nbytes for call in calls.values()):
        raise InvalidTransition(f"{lane.hop.name}: {lane.inflight} bytes in calls {lane.calls.keys()}, not {calls}")
    for number, transfer in lane.transfers.items():
        _require(transfer.number == number, transfer, "is not where its lane keeps it")
        _transfer(transfer)
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


def _transfer(transfer: HostTransfer) -> None:
    dead, whole, everything = transfer.dead, transfer.whole, set(range(len(transfer.objects)))
    _require(not dead & whole and dead | whole <= everything, transfer, "has objects that are lost and whole")
    _require(transfer.occupied <= dead, transfer, "keeps room that it has not lost")
    live = [item for index, item in enumerate(transfer.objects) if index not in dead]
    sums = (sum(item.layer_bytes for item in live), sum(item.blocks for item in live))
    _require(sums == (transfer.layer_bytes, transfer.layer_blocks), transfer, "miscounts its live objects")
    over = not transfer.calls and dead | whole == everything
    _require(transfer.closed == over, transfer, "is closed exactly when all is over")
    _require(not transfer.closed or bool(transfer.occupied), transfer, "is over and was not forgotten")
    _require(transfer.wanted or bool(transfer.calls) or transfer.closed, transfer, "is not wanted and was not ended")
    for index in everything - dead:
        _require((transfer.reached((index,)) == len(transfer.layers)) == (index in whole), transfer, "hides an object")
    held = {index for edge in transfer.edges for index in edge.spans}
    _require(bool(transfer.calls) or transfer.occupied <= held, transfer, "keeps room that nothing touches")
    for edge in transfer.edges:
        job = edge.transfer.job
        _require(edge in job.edges and not job.done, transfer, f"is held by loads of step {job.step.number} that ended")
        _require(not dead & set(edge.waiting), transfer, "is waited for where it is lost")
    _require(not transfer.closed or transfer.alarm == math.inf, transfer, "has a deadline and is over")

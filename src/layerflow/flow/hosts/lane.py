"""The host's lanes: what the core remembers of each hop between arena and backend, and what may move now."""

from __future__ import annotations

import math

from layerflow.flow.budget import Budget
from layerflow.flow.commands import Call, Command
from layerflow.flow.events import Hop
from layerflow.flow.graph.host_transfer import HostTransfer, Source
from layerflow.flow.hosts.pace import FIRST_BYTES, Pace
from layerflow.flow.ring import Ring

CALLS_AHEAD = 3
"""Calls that a host has been given and not ended: so many that it never waits for the next one."""


class HostLane:
    """One hop. The host ends its calls in order."""

    __slots__ = ("began", "calls", "hop", "inflight", "newest", "next_call", "pace", "ring", "sources", "transfers")

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self.ring: Ring[Source] = Ring(hop)
        self.pace = Pace()
        self.sources: dict[str, Source] = {}
        self.transfers: dict[int, HostTransfer] = {}
        self.calls: dict[int, HostTransfer] = {}
        self.newest = 0
        self.next_call = 1
        self.inflight = 0
        self.began = -math.inf

    def source(self, name: str) -> Source:
        """Who transfers are for; remembered for as long as there are any."""
        return self.sources.setdefault(name, Source(name))

    def add(self, transfer: HostTransfer) -> None:
        """A transfer has begun."""
        self.transfers[transfer.number] = transfer
        transfer.source.transfers[transfer.number] = transfer
        self.newest = transfer.number
        self.join(transfer)

    def remove(self, transfer: HostTransfer) -> None:
        """Nothing of a transfer moves any more."""
        source = transfer.source
        if source.transfers.pop(transfer.number, None) is not None and not source.transfers:
            self.ring.leave(source)
            del self.sources[source.name]

    def join(self, transfer: HostTransfer) -> None:
        """Something of the transfer may move now."""
        if transfer.permitted and transfer.number in transfer.source.transfers:
            self.ring.join(transfer.source)

    def fits(self, nbytes: int, budget: Budget) -> bool:
        """Whether a call may be handed out now: one that is larger than the whole budget only alone."""
        room = budget.limits.max_inflight_bytes - self.inflight
        return len(self.calls) < CALLS_AHEAD and (nbytes <= room or not self.calls)

    def most_bytes(self, transfer: HostTransfer, budget: Budget) -> int:
        """What the transfer's next call may move: little at first, for the engine waits for its first layer."""
        pace = min(FIRST_BYTES, self.pace.nbytes) if not transfer.index else self.pace.nbytes
        return min(pace, budget.limits.max_transfer_bytes, budget.limits.max_inflight_bytes)

    def ended(self, call: Call, now: float) -> None:
        """A call has ended."""
        del self.calls[call.call]
        self.inflight -= call.nbytes
        self.pace.ended(call.nbytes, now - self.began)
        self.began = now

    def lost(self) -> None:
        """The host is dead."""
        self.calls.clear()
        self.inflight = 0
        self.pace = Pace()


def grant_calls(lane: HostLane, budget: Budget, now: float, out: list[Command]) -> None:
    """Hand out whatever may run now: in turns between sources, and what is wanted soonest of each."""
    ring = lane.ring
    while ring.queue and len(lane.calls) < CALLS_AHEAD:
        source = ring.queue[0]
        transfer = source.next_transfer()
        if transfer is None:
            ring.leave(source)
            continue
        most = lane.most_bytes(transfer, budget)
        extent = transfer.next_extent(budget.limits.max_transfer_blocks, most)
        if not ring.turn(source, extent.nbytes, max(most, extent.nbytes)):
            continue
        if not lane.fits(extent.nbytes, budget):
            return
        ring.charge(source, extent.nbytes)
        transfer.advance(extent)
        call = Call(lane.hop, transfer.number, lane.next_call, *extent)
        lane.next_call += 1
        if not lane.calls:
            lane.began = now
        lane.calls[call.call] = transfer
        transfer.calls[call.call] = call
        lane.inflight += extent.nbytes
        out.append(call)

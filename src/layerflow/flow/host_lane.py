"""The host's lanes: what the core remembers of each hop between arena and backend, and what may move now."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from layerflow.errors import InvalidTransition
from layerflow.flow.budget import Budget
from layerflow.flow.commands import Call, Command
from layerflow.flow.events import CallDone, Hop
from layerflow.flow.host_transfer import CallExtent, Client, HostTransfer, by_reason
from layerflow.flow.ring import Ring

CALLS_AHEAD = 3
"""Calls that a host has been given and not ended: so many that it never waits for the next one."""
FIRST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
QUICK_S = 5e-3
"""A call of so long is large enough: what has to wait for it waits no longer than an engine computes a layer."""
WORTH_IT = 1.25
"""Twice the bytes must come at a rate so many times as high."""

T = TypeVar("T", bound=HostTransfer)


class CallSizer:
    """The size of the next call of one lane, from the calls that have ended.

    Small calls let the other transfers have their turn and bring the first layers early; where a call costs much
    beside its bytes, as it does at the far end of a network, only large calls are fast. So a call grows while calls
    are quick, or while twice the bytes come at a clearly higher rate, and shrinks where they do not.
    """

    __slots__ = ("_level", "_rates")

    def __init__(self) -> None:
        self._level = 0
        self._rates = [0.0] * (MOST_BYTES // FIRST_BYTES).bit_length()

    @property
    def nbytes(self) -> int:
        """A call moves about so much."""
        return FIRST_BYTES << self._level

    def ended(self, nbytes: int, seconds: float) -> None:
        """A call has moved so much in so long; small ones say nothing about large ones."""
        level = self._level
        if 2 * nbytes <= self.nbytes or nbytes > 2 * self.nbytes:
            return
        rate = nbytes / max(seconds, 1e-6)
        known = self._rates[level]
        self._rates[level] = rate if not known else (known + rate) / 2
        gains = not level or self._rates[level] > WORTH_IT * self._rates[level - 1]
        if (seconds < QUICK_S or gains) and level + 1 < len(self._rates):
            self._level += 1
        elif not gains and level and seconds > 2 * QUICK_S:
            self._level -= 1


class HostLane(Generic[T]):
    """One hop. The host ends its calls in order.

    :ivar backlog: bytes of all objects of what is on its way; writes only.
    """

    __slots__ = (
        "backlog",
        "began",
        "calls",
        "clients",
        "hop",
        "inflight",
        "next_call",
        "ring",
        "sizer",
        "transfers",
    )  # fmt: skip

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self.ring: Ring[Client] = Ring(hop)
        self.sizer = CallSizer()
        self.clients: dict[str, Client] = {}
        self.transfers: dict[int, T] = {}
        self.calls: dict[int, T] = {}
        self.next_call = 1
        self.inflight = 0
        self.backlog = 0
        self.began = -math.inf

    def client(self, name: str) -> Client:
        """Return whom transfers are for; remembered for as long as there are any."""
        return self.clients.setdefault(name, Client(name))

    def add(self, transfer: T) -> None:
        """A transfer has begun."""
        self.transfers[transfer.number] = transfer
        transfer.client.transfers[transfer.number] = transfer
        self.join(transfer)

    def remove(self, transfer: T) -> None:
        """Nothing of a transfer moves any more."""
        client = transfer.client
        del self.transfers[transfer.number]
        del client.transfers[transfer.number]
        if not client.transfers:
            self.ring.leave(client)
            del self.clients[client.name]

    def join(self, transfer: T) -> None:
        """Something of the transfer may move now."""
        if transfer.permitted and transfer.number in transfer.client.transfers:
            self.ring.join(transfer.client)

    def fits(self, nbytes: int, budget: Budget) -> bool:
        """Whether a call may be handed out now: one that is larger than the whole budget only alone."""
        room = budget.limits.max_granted_bytes - self.inflight
        return len(self.calls) < CALLS_AHEAD and (nbytes <= room or not self.calls)

    def most_bytes(self, transfer: HostTransfer, budget: Budget) -> int:
        """What the transfer's next call may move: little at first, for the engine waits for its first layer."""
        wanted = min(FIRST_BYTES, self.sizer.nbytes) if not transfer.index else self.sizer.nbytes
        return min(wanted, budget.limits.max_transfer_bytes, budget.limits.max_granted_bytes)

    def hand_out(self, transfer: T, extent: CallExtent, now: float) -> Call:
        """Give the host a call."""
        call = Call(self.hop, transfer.number, self.next_call, *extent)
        self.next_call += 1
        if not self.calls:
            self.began = now
        self.calls[call.call] = transfer
        transfer.calls[call.call] = call
        self.inflight += call.nbytes
        return call

    def take(self, event: CallDone, now: float) -> tuple[T, Call, dict[str, list[int]]] | None:
        """Return the transfer of a call that the host has ended, the call, and by reason the objects that have failed
        now; None = that is long over.

        :raises InvalidTransition: for a call that was never handed out, or objects that the transfer does not have.
        """
        transfer = self.calls.get(event.call)
        if transfer is None:
            if not 0 < event.call < self.next_call:
                raise InvalidTransition(f"the host ended call {event.call} ({self.hop.name}), which it was never given")
            return None
        if any(not 0 <= index < len(transfer.objects) for index, _ in event.failed):
            named = f"{self.hop.name} {transfer.number}"
            raise InvalidTransition(f"the host failed objects that {named} does not have: {event.failed[:3]}")
        del self.calls[event.call]
        call = transfer.calls.pop(event.call)
        self.inflight -= call.nbytes
        self.sizer.ended(call.nbytes, now - self.began)
        self.began = now
        return transfer, call, by_reason(event.failed, transfer.unfinished()) if event.failed else {}

    def lost(self) -> None:
        """The host is dead."""
        self.calls.clear()
        self.inflight = 0
        self.sizer = CallSizer()


def grant_calls(lane: HostLane[T], budget: Budget, now: float, out: list[Command]) -> None:
    """Hand out whatever may run now: in turns between engines, and what each wants soonest."""
    ring = lane.ring
    while ring.queue and len(lane.calls) < CALLS_AHEAD:
        client = ring.queue[0]
        transfer = client.next_transfer()
        if transfer is None:
            ring.leave(client)
            continue
        most = lane.most_bytes(transfer, budget)
        extent = transfer.next_extent(budget.limits.max_transfer_blocks, most)
        if not ring.turn(client, extent.nbytes, max(most, extent.nbytes)):
            continue
        if not lane.fits(extent.nbytes, budget):
            return
        ring.charge(client, extent.nbytes)
        transfer.advance(extent)
        out.append(lane.hand_out(lane.transfers[transfer.number], extent, now))

"""What hosts bring, as the model of :mod:`flow_world` sees it: what has come, and who may touch what."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerflow.flow.commands import Arrived, Call, ObjectsLost, RoomFreed, TransferDone
from layerflow.flow.events import FetchOpened, Hop, Limits, Need

CALLS_AHEAD = 3


@dataclass
class Fetch:
    """One fetch; `come`: by object, the layers that are in the arena."""

    event: FetchOpened
    come: list[set[int]]
    lost: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    vacated: set[int] = field(default_factory=set)
    leased: bool = False
    claimed: bool = False
    available: int = 0
    done: bool = False

    @property
    def coming(self) -> list[int]:
        return [i for i in range(len(self.event.objects)) if i not in self.lost and i not in self.whole]


class Fetches:
    """All fetches, from the backend and from peers, and the calls of their hosts."""

    def __init__(self) -> None:
        self.all: dict[int, Fetch] = {}
        self.calls: dict[tuple[Hop, int], Call] = {}
        self.moved: set[tuple[int, int, int]] = set()

    def open(self, event: FetchOpened) -> None:
        available = len(event.layers) if event.available < 0 else event.available
        self.all[event.fetch] = Fetch(event, [set() for _ in event.objects], available=available)

    def call(self, call: Call, limits: Limits) -> None:
        """The host is given a call: within the caps, each layer once, and only what has not failed."""
        fetch = self.all[call.transfer]
        live = [i for i in range(call.lo, call.hi) if i not in fetch.lost]
        layers = range(call.layer_lo, call.layer_hi)
        assert live and layers and not fetch.done and (call.hop, call.call) not in self.calls
        assert call.hop is fetch.event.hop, "by the way of another host"
        assert not set(live) & fetch.whole
        assert call.layer_hi <= fetch.available, "asked for what its source has not stored"
        items = [fetch.event.objects[i] for i in live]
        assert call.nbytes == len(layers) * sum(item.layer_bytes for item in items)
        if len(live) > 1 or len(layers) > 1:
            assert call.nbytes <= limits.max_transfer_bytes
            assert len(layers) * sum(item.blocks for item in items) <= limits.max_transfer_blocks
        others = [one.nbytes for (hop, _), one in self.calls.items() if hop is call.hop]
        assert not others or sum(others) + call.nbytes <= limits.max_granted_bytes
        assert len(others) < CALLS_AHEAD
        for index in live:
            for layer in layers:
                assert (call.transfer, index, layer) not in self.moved, "moved a second time"
                self.moved.add((call.transfer, index, layer))
        self.calls[call.hop, call.call] = call

    def ended(self, key: tuple[Hop, int], failed: set[int]) -> None:
        call = self.calls.pop(key)
        fetch = self.all[call.transfer]
        for index in range(call.lo, call.hi):
            if index not in failed and index not in fetch.lost:
                fetch.come[index] |= set(range(call.layer_lo, call.layer_hi))

    def there(self, need: Need, layer: int) -> bool:
        return layer in self.all[need.incoming].come[need.item]

    def arrived(self, command: Arrived) -> None:
        fetch = self.all[command.transfer]
        for index in command.objects:
            assert command.hop is fetch.event.hop
            assert len(fetch.come[index]) == len(fetch.event.layers), "published before it was whole"
            assert index not in fetch.whole and index not in fetch.lost
            fetch.whole.add(index)

    def lose(self, command: ObjectsLost) -> None:
        fetch = self.all[command.transfer]
        assert command.hop is fetch.event.hop
        assert command.objects and not set(command.objects) & (fetch.lost | fetch.whole)
        fetch.lost |= set(command.objects)

    def vacate(self, command: RoomFreed, held: set[tuple[int, int]]) -> None:
        """Nothing touches the room: no call of the host, no step whose loads are under way."""
        fetch, free = self.all[command.transfer], set(command.objects)
        assert free and free <= fetch.lost and not free & fetch.vacated
        assert not any(call.transfer == command.transfer for call in self.calls.values()), "under the host's hands"
        assert not any((command.transfer, index) in held for index in free), "under a step's hands"
        fetch.vacated |= free

    def done(self, command: TransferDone) -> None:
        fetch = self.all[command.transfer]
        assert not fetch.done and not fetch.coming and command.hop is fetch.event.hop
        assert not any(call.transfer == command.transfer for call in self.calls.values())
        fetch.done = True

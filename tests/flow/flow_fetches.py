"""The host, as the model of :mod:`flow_world` sees it: what has come, and who may touch what."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerflow.flow.commands import Arrived, Call, ObjectsLost, TransferDone, Vacate
from layerflow.flow.events import Need
from layerflow.flow.host_events import FetchOpened
from layerflow.flow.limits import Limits


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
    """All fetches and the calls of their host."""

    def __init__(self) -> None:
        self.all: dict[int, Fetch] = {}
        self.calls: dict[int, Call] = {}
        self.moved: set[tuple[int, int, int]] = set()

    def open(self, event: FetchOpened) -> None:
        available = len(event.layers) if event.available < 0 else event.available
        self.all[event.fetch] = Fetch(event, [set() for _ in event.objects], available=available)

    def call(self, call: Call, limits: Limits) -> None:
        """The host is given a call: within the caps, each layer once, and only what has not failed."""
        fetch = self.all[call.transfer]
        live = [i for i in range(call.lo, call.hi) if i not in fetch.lost]
        layers = range(call.layer_lo, call.layer_hi)
        assert live and layers and not fetch.done and call.call not in self.calls
        assert not set(live) & fetch.whole
        assert call.layer_hi <= fetch.available, "asked for what its source has not stored"
        items = [fetch.event.objects[i] for i in live]
        assert call.nbytes == len(layers) * sum(item.layer_bytes for item in items)
        if len(live) > 1 or len(layers) > 1:
            assert call.nbytes <= limits.max_transfer_bytes
            assert len(layers) * sum(item.blocks for item in items) <= limits.max_transfer_blocks
        if self.calls:
            assert sum(one.nbytes for one in self.calls.values()) + call.nbytes <= limits.max_inflight_bytes
        for index in live:
            for layer in layers:
                assert (call.transfer, index, layer) not in self.moved, "moved a second time"
                self.moved.add((call.transfer, index, layer))
        self.calls[call.call] = call

    def ended(self, number: int, failed: set[int]) -> None:
        call = self.calls.pop(number)
        fetch = self.all[call.transfer]
        for index in range(call.lo, call.hi):
            if index not in failed and index not in fetch.lost:
                fetch.come[index] |= set(range(call.layer_lo, call.layer_hi))

    def there(self, need: Need, layer: int) -> bool:
        return layer in self.all[need.fetch].come[need.item]

    def arrived(self, command: Arrived) -> None:
        fetch = self.all[command.fetch]
        for index in command.objects:
            assert len(fetch.come[index]) == len(fetch.event.layers), "published before it was whole"
            assert index not in fetch.whole and index not in fetch.lost
            fetch.whole.add(index)

    def lose(self, command: ObjectsLost) -> None:
        fetch = self.all[command.transfer]
        assert command.objects and not set(command.objects) & (fetch.lost | fetch.whole)
        fetch.lost |= set(command.objects)

    def vacate(self, command: Vacate, held: set[tuple[int, int]]) -> None:
        """Nothing touches the room: no call of the host, no step whose loads are under way."""
        fetch, free = self.all[command.fetch], set(command.objects)
        assert free and free <= fetch.lost and not free & fetch.vacated
        assert not any(call.transfer == command.fetch for call in self.calls.values()), "under the host's hands"
        assert not any((command.fetch, index) in held for index in free), "under a step's hands"
        fetch.vacated |= free

    def done(self, command: TransferDone) -> None:
        fetch = self.all[command.transfer]
        assert not fetch.done and not fetch.coming
        assert not any(call.transfer == command.transfer for call in self.calls.values())
        fetch.done = True

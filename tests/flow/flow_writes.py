"""The way to the backend, as the model of :mod:`flow_world` sees it: what is there, and what is published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flow_books import Side, covered

from layerflow.flow.commands import Call, ObjectsLost, ObjectsPublished, TransferDone, WriteBegun
from layerflow.flow.events import Direction, Hop, WriteOpened

if TYPE_CHECKING:
    from flow_world import World


@dataclass
class Write:
    """One write. :param side: the step's saves; None = it has none. :param there: by object, layers at the backend."""

    event: WriteOpened
    side: Side | None
    layers: list[int]
    there: list[set[int]]
    lost: dict[int, str] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    begun: bool = False
    done: bool = False

    @property
    def left(self) -> list[int]:
        return [i for i in range(len(self.event.objects)) if i not in self.lost and i not in self.whole]

    @property
    def nbytes(self) -> int:
        return len(self.layers) * sum(item.layer_bytes for item in self.event.objects)


class Writes:
    """All writes and the calls of their host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.all: dict[int, Write] = {}
        self.calls: dict[tuple[Hop, int], Call] = {}
        self.moved: set[tuple[int, int, int]] = set()
        self.cancelled: list[tuple[Side, int]] = []

    def open(self, event: WriteOpened) -> None:
        one = self._world.live.get((event.session, event.step))
        shapes = self._world.layers.get(event.session, ())
        layers = [layer for layer, shape in enumerate(shapes) if shape.group == event.group]
        side = one.sides[Direction.SAVE] if one is not None else None
        self.all[event.write] = Write(event, side, layers, [set() for _ in event.objects])

    def begun(self, command: WriteBegun) -> None:
        write = self.all[command.write]
        assert not write.begun and not write.done
        backlog = sum(one.nbytes for one in self.all.values() if one.begun and not one.done)
        assert backlog + write.nbytes <= self._world.limits.write_backlog_bytes
        write.begun = True

    def call(self, call: Call) -> None:
        """Within the caps, each layer once, only what is stored in the arena; published is only what is committed."""
        write, limits = self.all[call.transfer], self._world.limits
        live = [i for i in range(call.lo, call.hi) if i not in write.lost]
        assert live and write.begun and not write.done and not write.whole and (call.hop, call.call) not in self.calls
        assert call.nbytes == (call.layer_hi - call.layer_lo) * sum(write.event.objects[i].layer_bytes for i in live)
        layers = range(call.layer_lo, call.layer_hi)
        items = [write.event.objects[i] for i in live]
        if len(live) > 1 or len(layers) > 1:
            assert call.nbytes <= limits.max_transfer_bytes
            assert len(layers) * sum(item.blocks for item in items) <= limits.max_transfer_blocks or not layers
        if self.calls and layers:
            assert sum(one.nbytes for one in self.calls.values()) + call.nbytes <= limits.max_granted_bytes
        if not layers:
            assert call.layer_lo == len(write.layers) and live == write.left and not write.asked
            write.asked = set(live)
        for index in live:
            if not layers:
                assert len(write.there[index]) == len(write.layers), "published before it was whole"
                assert write.event.parts[index] in write.side.committed, "published what is not committed"
            for layer in layers:
                assert (call.transfer, index, layer) not in self.moved, "moved a second time"
                assert self._stored(write, index, layer), "moved what is not stored"
                self.moved.add((call.transfer, index, layer))
        self.calls[call.hop, call.call] = call

    def _stored(self, write: Write, index: int, layer: int) -> bool:
        """Bytes of a part that is dying do not matter: its object will be lost."""
        part, number = write.event.parts[index], write.layers[layer]
        if part in write.side.dead:
            return True
        lo, hi = write.side.ranges[part]
        size = self._world.layers_ever[write.event.session][number].block_bytes
        return covered(write.side.done.get(number, []), lo * size, hi * size)

    def ended(self, key: tuple[Hop, int], failed: set[int]) -> None:
        call = self.calls.pop(key)
        write = self.all[call.transfer]
        write.failed |= failed
        for index in range(call.lo, call.hi):
            if index not in failed:
                write.there[index] |= set(range(call.layer_lo, call.layer_hi))

    def written(self, command: ObjectsPublished) -> None:
        write, objects = self.all[command.write], set(command.objects)
        assert objects and objects <= write.asked and not objects & write.lost.keys() and not objects & write.whole
        write.whole |= objects

    def lose(self, command: ObjectsLost) -> None:
        write, objects = self.all[command.transfer], set(command.objects)
        assert objects and not objects & (write.lost.keys() | write.whole)
        write.lost |= dict.fromkeys(objects, command.reason)
        if write.side is not None and command.reason not in ("shed", "signal 9", "purged"):
            for index in objects - write.failed:
                self.cancelled.append((write.side, write.event.parts[index]))

    def done(self, command: TransferDone) -> None:
        write = self.all[command.transfer]
        assert not write.done and not write.left
        assert not any(call.transfer == command.transfer for call in self.calls.values())
        write.done = True

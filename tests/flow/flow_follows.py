"""Loads that follow saves, as the model of :mod:`flow_world` sees them: what is stored, and who may touch what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flow_books import Pass, Side, covered

from layerflow.flow.commands import Arrived, LayersStored, ObjectsLost, RoomFreed, TransferDone
from layerflow.flow.events import Direction, FollowMoved, FollowOpened, IncomingFailed

if TYPE_CHECKING:
    from flow_world import World


@dataclass
class Follow:
    """One follow.

    :param side: the saves that it follows; None = no step saves it.
    :param moved: where objects went.
    :param leased: another server reads it; :param told: so many layers it was told of.
    """

    event: FollowOpened
    side: Side | None
    lost: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    vacated: set[int] = field(default_factory=set)
    done: bool = False
    leased: bool = False
    told: int = 0

    @property
    def coming(self) -> list[int]:
        over = self.lost | self.whole | self.moved.keys()
        return [index for index in range(self.event.objects) if index not in over]


class Follows:
    """All follows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.all: dict[int, Follow] = {}
        self.cancelled: list[tuple[Side, int]] = []

    def open(self, event: FollowOpened) -> None:
        one = self._world.live.get((event.session, event.step)) if event.parts else None
        side = one.sides[Direction.SAVE] if one is not None else None
        self.all[event.follow] = Follow(event, side, leased=event.leased)

    def known(self) -> list[int]:
        """Of which something is left: objects that come, or room that is kept."""
        return sorted(number for number, one in self.all.items() if not one.done or one.lost > one.vacated)

    def move(self, event: FollowMoved) -> None:
        follow = self.all[event.follow]
        follow.moved.update({old: (event.into, new) for new, old in enumerate(event.objects)})

    def given_up(self, event: IncomingFailed) -> set[int]:
        return {index for index, _ in event.failed} & set(self.all[event.incoming].coming)

    def place(self, need: tuple[int, int]) -> tuple[int, int]:
        """The upstream, and the number of its object, that an object of a need is now."""
        while need[0] in self.all and need[1] in self.all[need[0]].moved:
            need = self.all[need[0]].moved[need[1]]
        return need

    def awaited(self, session: int, step: int) -> set[tuple[int, int]]:
        """The steps whose loads this one waits for when nothing moves any more: they hold up saves that it needs."""
        live = self._world.live
        mine = live[session, step]
        if mine.loads_done or not mine.event.loads:
            return self._held_up(mine)
        found = set()
        for number, index in self._world.needed(session, step):
            follow = self.all.get(number)
            if follow is not None and index in follow.coming:
                found |= self._held_up(live[follow.event.session, follow.event.step])
        return found

    def _held_up(self, one: Pass) -> set[tuple[int, int]]:
        """A step's saves are not published before its loads, and those of earlier steps for the same requests."""
        saves, key = one.sides[Direction.SAVE], (one.event.session, one.event.step)
        left = {part.request for index, part in enumerate(saves.parts) if index not in saves.dead | saves.committed}
        found = set()
        for other_key, other in self._world.live.items():
            requests = {part.request for part in other.sides[Direction.LOAD].parts}
            earlier = other_key[0] == key[0] and other_key < key and left & requests
            if left and not other.loads_done and requests and (other_key == key or earlier):
                found.add(other_key)
        return found

    def there(self, place: tuple[int, int], layer: int) -> bool:
        """Is this layer stored, and, if it is the last one, published?"""
        follow = self.all[place[0]]
        event = follow.event
        if follow.side is None:
            return False
        part = event.parts[place[1]]
        number = event.layers[layer]
        lo, hi = follow.side.ranges[part]
        size = self._world.layers_ever[event.session][number].block_bytes
        stored = covered(follow.side.done.get(number, []), lo * size, hi * size)
        return stored and (part in follow.side.committed or layer < len(event.layers) - 1)

    def stored(self, command: LayersStored) -> None:
        """A reader at another server is told no more than is stored, of all that it still waits for."""
        follow = self.all[command.transfer]
        assert follow.leased and follow.coming and command.layers > follow.told
        for index in follow.coming:
            for layer in range(follow.told, command.layers):
                assert self.there((command.transfer, index), layer), f"told of layer {layer} of {index}, not stored"
        follow.told = command.layers

    def arrived(self, command: Arrived) -> None:
        follow = self.all[command.transfer]
        assert follow.side is not None
        for index in command.objects:
            assert follow.event.parts[index] in follow.side.committed, "published what is not committed"
            assert index in follow.coming
            follow.whole.add(index)

    def lose(self, command: ObjectsLost) -> None:
        follow = self.all[command.transfer]
        assert command.objects and set(command.objects) <= set(follow.coming)
        if follow.side is not None:
            self.cancelled += [(follow.side, follow.event.parts[index]) for index in command.objects]
        follow.lost |= set(command.objects)

    def vacate(self, command: RoomFreed, held: set[tuple[int, int]]) -> None:
        """No reader and no step's loads hold the room. Whether a save still writes to it is told by its Revoke."""
        follow, free = self.all[command.transfer], set(command.objects)
        assert not follow.leased, "under a reader's hands"
        assert free and free <= follow.lost and not free & follow.vacated
        assert not any((command.transfer, index) in held for index in free), "under a step's hands"
        follow.vacated |= free

    def end(self, command: TransferDone) -> None:
        follow = self.all[command.transfer]
        assert not follow.done and not follow.coming
        follow.done = True

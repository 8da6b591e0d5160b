"""What planning a step results in, and what the server remembers of it while it is open."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from layerflow.flow.events import Event
from layerflow.wire.messages import Plan


def step_owner(session: int, step: int) -> tuple[str, int, int]:
    """Who pins what a step loads, and has the room for what it saves."""
    return ("step", session, step)


@dataclass(slots=True)
class StepBook:
    """What the server remembers of an open step.

    :param save_parts: for each save part of the core: its position in the OpenStep message.
    :param save_keys: for each save part of the core: the keys it has room for.
    :param load_objects: per group: (first block number, key) of every object loaded, ascending.
    :param direct: its objects are the tier's business and its worker's, not the arena's.
    :param opened_at: monotonic seconds.
    :param in_turns: other workers hold the same, and store what this one does not.
    """

    owner: Hashable
    direct: bool = False
    in_turns: bool = False
    save_parts: list[int] = field(default_factory=list)
    save_keys: list[list[bytes]] = field(default_factory=list)
    load_objects: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    opened_at: float = field(default_factory=time.monotonic)
    _parts: dict[bytes, int] | None = None

    def part_of(self, key: bytes) -> int | None:
        """The save part of the core that stores an object."""
        if self._parts is None:
            self._parts = {key: part for part, keys in enumerate(self.save_keys) for key in keys}
        return self._parts.get(key)

    def keys_of(self, group: int, lo: int, hi: int) -> list[bytes]:
        """Objects that hold any of the load blocks `lo` to `hi` of a group."""
        objects = self.load_objects.get(group, [])
        ends = [start for start, _ in objects[1:]] + [hi]
        return [key for (start, key), end in zip(objects, ends, strict=True) if start < hi and end > lo]


@dataclass(frozen=True, slots=True)
class Opening:
    """The result of planning one step.

    :param events: what the core is to be told: the step, then what carries its saves on.
    :param loaded: the keys that each request's loads have pinned.
    """

    events: Sequence[Event]
    plan: Plan
    book: StepBook
    loaded: list[tuple[str, list[bytes]]]
    full: int
    missing: int

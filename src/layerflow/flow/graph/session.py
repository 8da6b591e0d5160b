"""What the core knows of an attached engine worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerflow.errors import InvalidTransition
from layerflow.flow.events import LayerShape, SessionOpened

if TYPE_CHECKING:
    from layerflow.flow.graph.step import DrainBarrier, Step, TransferJob


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The layers of one group.

    :param layers: the model's layer numbers, ascending.
    :param block_bytes: bytes of one block in each of them.
    :param tail_bytes: bytes of one block from each of them to the last, and 0 at the end.
    """

    group: int
    layers: tuple[int, ...]
    block_bytes: tuple[int, ...]
    tail_bytes: tuple[int, ...]


def group_shapes(layers: Sequence[LayerShape]) -> dict[int, GroupShape]:
    """Layers by group, with the running sums that size a part without looking at its layers."""
    shapes: dict[int, GroupShape] = {}
    for group in sorted({layer.group for layer in layers}):
        numbers = tuple(number for number, layer in enumerate(layers) if layer.group == group)
        sizes = tuple(layers[number].block_bytes for number in numbers)
        tails = [0]
        for size in reversed(sizes):
            tails.append(tails[-1] + size)
        shapes[group] = GroupShape(group, numbers, sizes, tuple(reversed(tails)))
    return shapes


@dataclass(slots=True, eq=False)
class Session:
    """One attached engine worker.

    :param pending: per direction, the jobs that have something to be granted, now or once it is in the arena, in
        the order of their steps.
    :param credit: per direction, bytes it may still take in this turn.
    :param queued: per direction, whether it stands in the ring.
    :param unsaved: bytes of its saves that are neither stored nor given up.
    :param gated: per direction, bytes granted that cannot move yet, less what was called back.
    :param aborting: requests whose blocks a batch may still touch.
    """

    number: int
    num_layers: int
    groups: dict[int, GroupShape]
    steps: dict[int, Step] = field(default_factory=dict)
    pending: tuple[dict[int, TransferJob], dict[int, TransferJob]] = field(default_factory=lambda: ({}, {}))
    credit: list[int] = field(default_factory=lambda: [0, 0])
    queued: list[bool] = field(default_factory=lambda: [False, False])
    unsaved: int = 0
    gated: list[int] = field(default_factory=lambda: [0, 0])
    aborting: dict[str, DrainBarrier] = field(default_factory=dict)


def open_session(event: SessionOpened) -> Session:
    """A session from its first message.

    :raises InvalidTransition: for a shape that cannot be.
    """
    if not event.layers or any(layer.block_bytes <= 0 or layer.group < 0 for layer in event.layers):
        raise InvalidTransition(
            f"session {event.session} opened with layers {event.layers[:4]}...: it needs at least one layer, "
            "and every layer a group and a positive block size"
        )
    return Session(event.session, len(event.layers), group_shapes(event.layers))

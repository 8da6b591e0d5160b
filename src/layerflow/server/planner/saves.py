"""The objects that a step saves: which of them this worker stores, and their room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from layerflow.boxes import Replica
from layerflow.flow.events import Part
from layerflow.places import NOWHERE
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.server.planner.book import StepBook
from layerflow.server.planner.check import Wanted
from layerflow.wire.messages import PlanPart
from layerflow.wire.packing import pack_u64

MOST_MISSED = 16_384
"""Objects that are remembered; of more, the oldest are their worker's turn again."""

Adopt = Callable[[Sequence[NewObject], Owner], Mapping[bytes, int]]
"""Takes room over that a hand-off has kept: of those objects that have some, where it is."""


class MissedTurns:
    """Where equal workers take turns, whoever computes such an object next may store it.

    A worker whose saves are shed again and again would leave its share of every prompt unstored otherwise, and a hit
    ends at the first object that is missing.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Saves of these were given up."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > MOST_MISSED:
            del self._keys[next(iter(self._keys))]

    def drop(self, keys: Iterable[bytes]) -> None:
        """These are stored."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)


def plan_saves(
    pool: Pool,
    book: StepBook,
    saves: list[tuple[Wanted, list[NewObject]]],
    bad: set[str],
    replicas: Sequence[Replica],
    missed: MissedTurns,
    adopt: Adopt,
) -> tuple[list[PlanPart], list[Part], int, dict[int, tuple[list[tuple[NewObject, int]], list[int]]]]:
    """The last of the results, by group: objects with their places, and each one's part."""
    plans, parts, full = [], [], 0
    placed: dict[int, tuple[list[tuple[NewObject, int]], list[int]]] = {}
    for position, (wanted, objects) in enumerate(saves):
        # What a request computes on top of a hit that is not there would be wrong: it is not stored.
        turn = [replicas[wanted.group].stores(new.key) or new.key in missed for new in objects]
        mine = [] if wanted.request in bad else [*compress(objects, turn)]
        kept = adopt(mine, book.owner)
        room = pool.reserve(mine, book.owner)
        offsets = [NOWHERE] * len(objects)
        for at, place in zip(compress(range(len(objects)), turn), room, strict=False):
            if place.outcome is ReserveStatus.RESERVED:
                offsets[at] = place.offset
            elif kept:
                offsets[at] = kept.get(objects[at].key, NOWHERE)
        full += sum(place.outcome in (ReserveStatus.FULL, ReserveStatus.TOO_LARGE) for place in room)
        keys = [key for key, offset in zip(wanted.keys, offsets, strict=True) if offset != NOWHERE]
        blocks = sum(count for count, offset in zip(wanted.counts.tolist(), offsets, strict=True) if offset != NOWHERE)
        if keys:
            book.save_parts.append(position)
            book.save_keys.append(keys)
            promised = any(key in kept for key in keys)
            parts.append(Part(wanted.request, wanted.group, blocks, promised=promised))
            stored, owners = placed.setdefault(wanted.group, ([], []))
            stored += [pair for pair in zip(objects, offsets, strict=True) if pair[1] != NOWHERE]
            owners += [len(parts) - 1] * len(keys)
        plans.append(PlanPart(pack_u64(offsets), b""))
    return plans, parts, full, placed

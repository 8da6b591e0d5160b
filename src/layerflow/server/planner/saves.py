"""The objects that a step saves: which of them this worker stores, and their room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

from layerflow.boxes import Replica
from layerflow.flow.events import Part
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.server.planner.book import StepBook
from layerflow.server.planner.check import Wanted
from layerflow.server.planner.missed import MissedTurns
from layerflow.wire import codec
from layerflow.wire.messages import NOWHERE, PlanPart

Adopt = Callable[[Sequence[NewObject], Owner], Mapping[bytes, int]]
"""Takes room over that a hand-off has kept: of those objects that have some, where it is."""


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
        plans.append(PlanPart(codec.pack_u64(offsets), b""))
    return plans, parts, full, placed

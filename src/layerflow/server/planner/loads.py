"""The objects that a step loads: pinned where they lie, followed or fetched where they are not in the arena yet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from layerflow.errors import ProtocolError
from layerflow.flow.events import Need, Part
from layerflow.places import NOWHERE
from layerflow.pool.base import Located, NewObject, Pool
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.lookup.lookup import stored_object
from layerflow.server.lookup.plans import plan_owner
from layerflow.server.planner.book import StepBook
from layerflow.server.planner.check import Wanted
from layerflow.wire.messages import Covered, OpenStep, PlanPart
from layerflow.wire.packing import pack_u32, pack_u64

if TYPE_CHECKING:
    from layerflow.server.handoffs.follows import Follows, PendingFollow
    from layerflow.server.handoffs.registry import Handoffs
    from layerflow.server.sources import Sources
    from layerflow.server.tier.fetches import PendingFetch


def plan_loads(
    pool: Pool,
    tier: Sources | None,
    session: ClientSession,
    book: StepBook,
    loads: list[Wanted],
    handoffs: Handoffs,
    follows: Follows,
) -> tuple[list[PlanPart], list[Part], set[str], list[Covered]]:
    """Pin what is in the arena; follow or fetch what is not.

    The results: places by part of the message, the core's parts, requests of which something is missing, and the
    objects that others stand in for.
    """
    spec = session.spec
    assert spec is not None
    # These pins end with the step, however it ends; with a lost session, too.
    located = [pool.acquire(wanted.keys, book.owner, math.inf, counts=wanted.counts.tolist()) for wanted in loads]
    _follow(follows, session, loads, located)
    if tier is not None:
        lacking = [key for wanted, found in zip(loads, located, strict=True) for key in _missing(wanted, found)]
        handoffs.give_back(session.engine, [key for key in lacking if follows.coming(key) is None])
        _bring(tier, follows, session, loads, located)
    plans: list[PlanPart] = []
    parts: list[Part] = []
    bad: set[str] = set()
    covered: list[Covered] = []
    numbered: dict[int, int] = {}
    for wanted, found in zip(loads, located, strict=True):
        offsets, stored, blocks = [], [], 0
        objects = book.load_objects.setdefault(wanted.group, [])
        at = numbered.get(wanted.group, 0)
        needs: list[Need] = []
        for key, place, count in zip(wanted.keys, found, wanted.counts.tolist(), strict=True):
            coming = _coming(tier, follows, key) if place is None else None
            if coming is not None and coming.job.layers != spec.groups[wanted.group].layers:
                coming = None  # brought as a piece, for workers of another pipeline size
            source = place or coming
            if source is None or source.blocks < count:
                bad.add(wanted.request)
                offsets.append(NOWHERE)
                stored.append(0)
                continue
            if coming is not None:
                needs.append(Need(coming.job.number, coming.position, blocks, blocks + count))
            if place is not None and place.pieces:
                boxes, pieces = zip(*place.pieces, strict=True)
                deep = spec.depth_of(wanted.group)
                covered.append(Covered(place.offset, [list(box.of_layers(deep)) for box in boxes], list(pieces)))
            offsets.append(source.offset)
            stored.append(source.blocks)
            objects.append((at + blocks, key))
            blocks += count
        numbered[wanted.group] = at + blocks
        plans.append(PlanPart(pack_u64(offsets), pack_u32(stored)))
        if blocks:
            parts.append(Part(wanted.request, wanted.group, blocks, tuple(needs)))
    return plans, parts, bad, covered


def take_over(
    pool: Pool, session: ClientSession, book: StepBook, message: OpenStep, loads: list[Wanted]
) -> tuple[list[PlanPart], list[Part], set[str], list[Covered]]:
    """The same of planned loads: the step pins what the plans of its hits do; its worker moves it already.

    :raises ProtocolError: it names what no plan of its engine pins, or more blocks than an object holds.
    """
    parts: list[Part] = []
    at: dict[int, int] = {}
    for part, wanted in zip(message.loads, loads, strict=True):
        places = pool.share(plan_owner(session.engine, part.plan), wanted.keys, book.owner)
        counts = wanted.counts.tolist()
        if places is None or any(count > place.blocks for count, place in zip(counts, places, strict=True)):
            pool.release(book.owner)
            raise ProtocolError(
                f"step {message.step}, request {part.request!r}, group {part.group}: its loads are not those of plan "
                f"{part.plan}, or that has ended; look the prompt up again"
            )
        objects = book.load_objects.setdefault(wanted.group, [])
        for key, count in zip(wanted.keys, counts, strict=True):
            objects.append((at.setdefault(wanted.group, 0), key))
            at[wanted.group] += count
        parts.append(Part(wanted.request, wanted.group, sum(counts)))
    return [], parts, set(), []


def _missing(wanted: Wanted, found: list[Located | None]) -> list[bytes]:
    return [key for key, place in zip(wanted.keys, found, strict=True) if place is None]


def _coming(tier: Sources | None, follows: Follows, key: bytes) -> PendingFetch | PendingFollow | None:
    """An object that is not in the arena yet: followed, or else fetched."""
    return follows.coming(key) or (tier.coming(key) if tier is not None else None)


def _follow(follows: Follows, session: ClientSession, loads: list[Wanted], located: list[list[Located | None]]) -> None:
    """Follow what the arena lacks and somebody is storing, for requests that have hit it so."""
    spec = session.spec
    assert spec is not None
    for wanted, found in zip(loads, located, strict=True):
        if None in found and follows.allowed(session.engine, wanted.request):
            lacking = [key for key in _missing(wanted, found) if follows.coming(key) is None]
            follows.open(lacking, wanted.group, spec.groups[wanted.group].layers)


def _bring(
    tier: Sources, follows: Follows, session: ClientSession, loads: list[Wanted], located: list[list[Located | None]]
) -> None:
    """Start fetching what the arena lacks, one job per group."""
    spec = session.spec
    assert spec is not None
    lacking: dict[int, dict[bytes, NewObject]] = {}
    for wanted, found in zip(loads, located, strict=True):
        for key, place in zip(wanted.keys, found, strict=True):
            if place is None and _coming(tier, follows, key) is None:
                tail = (wanted.tail, wanted.parent) if key == wanted.keys[-1] else (0, b"")
                lacking.setdefault(wanted.group, {})[key] = stored_object(spec, wanted.group, key, *tail)
    for group, objects in lacking.items():
        tier.bring(list(objects.values()), spec.groups[group].layers, session.engine)

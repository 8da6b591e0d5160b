"""A step's plan: where its loads lie, which room its saves get, what the core is told and the server remembers."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from layerflow.boxes import Replica
from layerflow.errors import ProtocolError
from layerflow.flow.events import Event, Need, Part, StepOpened
from layerflow.places import NOWHERE
from layerflow.pool.base import Located, NewObject, Owner, Pool, ReserveStatus
from layerflow.server.clients import ClientSession
from layerflow.server.plans import plan_owner
from layerflow.server.search import stored_object
from layerflow.server.step_check import CheckedPart, CheckedStep
from layerflow.spec import ModelSpec
from layerflow.wire.messages import LACKING, Covered, OpenStep, Plan, PlanPart
from layerflow.wire.packing import pack_u32, pack_u64

if TYPE_CHECKING:
    from layerflow.server.handoffs.registry import Handoffs
    from layerflow.server.incoming import IncomingObjects, IncomingSaves
    from layerflow.server.sources import ObjectSources


# What planning a step results in, and what the server remembers of it while it is open.


def step_owner(session: int, step: int) -> tuple[str, int, int]:
    """The owner of the pins of what a step loads, and of the room for what it saves."""
    return ("step", session, step)


@dataclass(slots=True)
class StepRecord:
    """What the server remembers of an open step.

    :param save_parts: for each save part of the core: its position in the OpenStep message.
    :param save_keys: for each save part of the core: the keys it has room for.
    :param unplaced: by position in the OpenStep message: why some of what a save part stores has no room.
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
    unplaced: dict[int, str] = field(default_factory=dict)
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
class PlannedStep:
    """The result of planning one step.

    :param events: what the core is to be told: the step, then what carries its saves on.
    :param loaded: the keys that each request's loads have pinned.
    """

    events: Sequence[Event]
    plan: Plan
    book: StepRecord
    loaded: list[tuple[str, list[bytes]]]
    full: int
    missing: int


# The objects that a step loads: pinned where they lie, followed or fetched where they are not in the arena yet.


def plan_loads(
    pool: Pool,
    sources: ObjectSources | None,
    session: ClientSession,
    *,
    book: StepRecord,
    loads: list[CheckedPart],
    handoffs: Handoffs,
    incoming: IncomingObjects,
    follows: IncomingSaves,
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
    if sources is not None:
        lacking = [key for wanted, found in zip(loads, located, strict=True) for key in _missing(wanted, found)]
        handoffs.cancel_reservations(session.engine, [key for key in lacking if follows.coming(key) is None])
        _bring(sources, incoming, session, loads, located)
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
            coming = incoming.coming.get(key) if place is None else None
            if coming is not None and coming.job.layers != spec.groups[wanted.group].layers:
                coming = None  # brought as a piece, for workers of another pipeline size
            source = place or coming
            if source is None or source.blocks < count:
                bad.add(wanted.request)
                offsets.append(NOWHERE)
                stored.append(0)
                continue
            if coming is not None:
                coming.job.readers.add(session.engine)
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
    pool: Pool, session: ClientSession, book: StepRecord, message: OpenStep, loads: list[CheckedPart]
) -> tuple[list[PlanPart], list[Part], set[str], list[Covered]]:
    """The same of planned loads: the step pins what the plans of its hits do; its worker moves it already.

    :raises ProtocolError: it names what no plan of its engine pins, or more blocks than an object holds.
    """
    parts: list[Part] = []
    at: dict[int, int] = {}
    for part, wanted in zip(message.loads, loads, strict=True):
        places = pool.copy_pins(plan_owner(session.engine, part.plan), wanted.keys, book.owner)
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


def _missing(wanted: CheckedPart, found: list[Located | None]) -> list[bytes]:
    return [key for key, place in zip(wanted.keys, found, strict=True) if place is None]


def _follow(
    follows: IncomingSaves, session: ClientSession, loads: list[CheckedPart], located: list[list[Located | None]]
) -> None:
    """Follow what the arena lacks and somebody is storing, for requests that have hit it so."""
    spec = session.spec
    assert spec is not None
    for wanted, found in zip(loads, located, strict=True):
        if None in found and follows.allowed(session.engine, wanted.request):
            lacking = [key for key in _missing(wanted, found) if follows.coming(key) is None]
            follows.open(lacking, wanted.group, spec.groups[wanted.group].layers)


def _bring(
    sources: ObjectSources,
    incoming: IncomingObjects,
    session: ClientSession,
    loads: list[CheckedPart],
    located: list[list[Located | None]],
) -> None:
    """Start fetching what the arena lacks, one job per group."""
    spec = session.spec
    assert spec is not None
    lacking: dict[int, dict[bytes, NewObject]] = {}
    for wanted, found in zip(loads, located, strict=True):
        for key, place in zip(wanted.keys, found, strict=True):
            if place is None and key not in incoming.coming:
                tail = (wanted.tail, wanted.parent) if key == wanted.keys[-1] else (0, b"")
                lacking.setdefault(wanted.group, {})[key] = stored_object(spec, wanted.group, key, *tail)
    for group, objects in lacking.items():
        sources.bring(list(objects.values()), spec.groups[group].layers, session.engine)


# The objects that a step saves: which of them this worker stores, and their room.


MOST_UNCLAIMED = 16_384
"""Objects that a worker did not store in its turn, so that any equal worker may; of more, the oldest are its turn
again.

A worker whose saves are shed again and again would leave its share of every prompt unstored otherwise, and a hit ends
at the first object that is missing.
"""

NO_ROOM = {
    ReserveStatus.FULL: "no room in the arena: everything in it is in use",
    ReserveStatus.TOO_LARGE: "no room in the arena: one object is larger",
}
"""Why an object is given up before it is written. One that is stored, or another's to write, is not."""

TakeReservations = Callable[[Sequence[NewObject], Owner], Mapping[bytes, int]]
"""Takes room over that a hand-off has kept: of those objects that have some, where it is."""


def plan_saves(
    pool: Pool,
    book: StepRecord,
    saves: list[tuple[CheckedPart, list[NewObject]]],
    *,
    bad: set[str],
    replicas: Sequence[Replica],
    unclaimed: Container[bytes],
    take_reservations: TakeReservations,
) -> tuple[list[PlanPart], list[Part], int, dict[int, tuple[list[tuple[NewObject, int]], list[int]]]]:
    """The last of the results, by group: objects with their places, and each one's part."""
    plans, parts, full = [], [], 0
    placed: dict[int, tuple[list[tuple[NewObject, int]], list[int]]] = {}
    for position, (wanted, objects) in enumerate(saves):
        # What a request computes on top of a hit that is not there would be wrong: it is not stored.
        turn = [replicas[wanted.group].is_writer(new.key) or new.key in unclaimed for new in objects]
        mine = [*compress(objects, turn)]
        unplaced = ""
        if wanted.request in bad:
            unplaced = "" if all(pool.lookup([new.key for new in mine])) else LACKING
            mine = []
        kept = take_reservations(mine, book.owner)
        room = pool.reserve(mine, book.owner)
        offsets = [NOWHERE] * len(objects)
        for at, place in zip(compress(range(len(objects)), turn), room, strict=False):
            if place.outcome is ReserveStatus.RESERVED:
                offsets[at] = place.offset
            elif kept:
                offsets[at] = kept.get(objects[at].key, NOWHERE)
            if offsets[at] == NOWHERE:
                unplaced = unplaced or NO_ROOM.get(place.outcome, "")
        full += sum(place.outcome in NO_ROOM for place in room)
        if unplaced:
            book.unplaced[position] = unplaced
        keys = [key for key, offset in zip(wanted.keys, offsets, strict=True) if offset != NOWHERE]
        blocks = sum(count for count, offset in zip(wanted.counts.tolist(), offsets, strict=True) if offset != NOWHERE)
        if keys:
            book.save_parts.append(position)
            book.save_keys.append(keys)
            awaited = any(key in kept for key in keys)
            parts.append(Part(wanted.request, wanted.group, blocks, awaited=awaited))
            stored, owners = placed.setdefault(wanted.group, ([], []))
            stored += [pair for pair in zip(objects, offsets, strict=True) if pair[1] != NOWHERE]
            owners += [len(parts) - 1] * len(keys)
        plans.append(PlanPart(pack_u64(offsets), b""))
    return plans, parts, full, placed


def plan_step(
    pool: Pool,
    sources: ObjectSources | None,
    session: ClientSession,
    *,
    message: OpenStep,
    checked: CheckedStep,
    replicas: Sequence[Replica],
    unclaimed: Container[bytes],
    handoffs: Handoffs,
    incoming: IncomingObjects,
    follows: IncomingSaves,
) -> PlannedStep:
    """Pin the objects to load, reserve room for those to save, and number the blocks.

    What the arena lacks is fetched from its sources.

    :param replicas: per group, which of the workers that hold the same heads this one is: they take turns in storing.
    :param unclaimed: objects that another worker did not store in its turn.
    :param handoffs: those of the worker's engine have room for what they wait for.
    :param incoming: what is on its way into the arena.
    :param follows: those of it that other steps are still storing, for requests that may wait for these.
    """
    spec = session.spec
    assert spec is not None
    loads, saves = checked.loads, checked.saves
    book = StepRecord(step_owner(session.number, message.step), in_turns=any(each.copies > 1 for each in replicas))
    load_plan, load_parts, bad, covered = (
        take_over(pool, session, book, message, loads)
        if message.planned
        else plan_loads(
            pool, sources, session, book=book, loads=loads, handoffs=handoffs, incoming=incoming, follows=follows
        )
    )
    save_plan, save_parts, full, placed = plan_saves(
        pool,
        book,
        saves,
        bad=bad,
        replicas=replicas,
        unclaimed=unclaimed,
        take_reservations=functools.partial(
            handoffs.take_reservations, session.engine, loads=functools.partial(follows.awaited_by, session.engine)
        ),
    )
    opened = StepOpened(
        session.number,
        message.step,
        message.deadline,
        message.save_deadline,
        tuple(load_parts),
        tuple(save_parts),
        planned=message.planned,
    )
    events: list[Event] = [opened]
    if sources is not None:
        for group, (objects, parts) in placed.items():
            events += sources.plan(
                (session.number, message.step),
                session.engine,
                group,
                layers=len(spec.groups[group].layers),
                placed=objects,
                parts=parts,
            )
    for group, (objects, parts) in placed.items():
        saved = {new.key: part for (new, _), part in zip(objects, parts, strict=True)}
        events += follows.reservations_taken((session.number, message.step), group, saved)
    # Objects that other ranks load too stay leased for them, until the lease ends.
    loaded = [(wanted.request, wanted.keys) for wanted in loads if spec.shard.copy_of(wanted.group).copies == 1]
    urgent = any(part.awaited for part in save_parts)
    plan = Plan(message.step, load_plan, save_plan, covered, urgent)
    return PlannedStep(events, plan, book, loaded, full, len(bad))


# A step of a worker that moves bytes past the arena: the core schedules it as any other, the objects are the worker's.
#
# The worker has leased what it loads and allocated what it saves before it opens the step, and left out the rest.


def plan_direct(session: ClientSession, message: OpenStep, checked: CheckedStep) -> PlannedStep:
    """Number the blocks; nothing is pinned and nothing reserved, and offsets are 0.

    :raises ProtocolError: more blocks are wanted of an object than it holds.
    """
    spec = session.spec
    assert spec is not None
    loads, saves = checked.loads, [wanted for wanted, _ in checked.saves]
    book = StepRecord(step_owner(session.number, message.step), direct=True)
    _remember_loads(book, loads)
    book.save_parts = list(range(len(saves)))
    book.save_keys = [wanted.keys for wanted in saves]
    event = StepOpened(
        session.number,
        message.step,
        message.deadline,
        message.save_deadline,
        tuple(_part(wanted) for wanted in loads),
        tuple(_part(wanted) for wanted in saves),
    )
    load_plan = [PlanPart(_zeros(wanted), pack_u32(_held(spec, wanted))) for wanted in loads]
    plan = Plan(message.step, load_plan, [PlanPart(_zeros(wanted), b"") for wanted in saves])
    return PlannedStep([event], plan, book, [], full=0, missing=0)


def _part(wanted: CheckedPart) -> Part:
    return Part(wanted.request, wanted.group, int(wanted.counts.sum()))


def _zeros(wanted: CheckedPart) -> bytes:
    return pack_u64([0] * len(wanted.keys))


def _held(spec: ModelSpec, wanted: CheckedPart) -> list[int]:
    """Blocks per layer of each object.

    :raises ProtocolError: more are wanted of one than it holds.
    """
    rules = spec.groups[wanted.group].rules
    held = [len(rules.keep(spec.chunk_tokens))] * len(wanted.keys)
    if wanted.tail:
        held[-1] = len(rules.keep(wanted.tail))
    for position, (has, count) in enumerate(zip(held, wanted.counts.tolist(), strict=True)):
        if count > has:
            raise ProtocolError(
                f"request {wanted.request!r}, group {wanted.group}, object {position}: {count} blocks are loaded of "
                f"the {has} that it holds"
            )
    return held


def _remember_loads(book: StepRecord, loads: list[CheckedPart]) -> None:
    at: dict[int, int] = {}
    for wanted in loads:
        objects = book.load_objects.setdefault(wanted.group, [])
        for key, count in zip(wanted.keys, wanted.counts.tolist(), strict=True):
            objects.append((at.setdefault(wanted.group, 0), key))
            at[wanted.group] += count

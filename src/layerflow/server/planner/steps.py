"""A step's objects: which lie where (loads), which get room (saves), and what the core is told of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from layerflow.boxes import Replica
from layerflow.errors import ProtocolError
from layerflow.flow.events import Event, Need, Part, StepOpened
from layerflow.hits import SLICE_KEYS
from layerflow.keys import DIGEST_BYTES, covered_by, object_key
from layerflow.objects import object_bytes
from layerflow.pool.base import Located, NewObject, Owner, Pool, ReserveStatus
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.lookup.lookup import stored_object
from layerflow.server.lookup.plans import plan_owner
from layerflow.server.planner.missed import MissedTurns
from layerflow.spec import GroupSpec, ModelSpec
from layerflow.wire import codec
from layerflow.wire.messages import NOWHERE, Covered, LoadPart, OpenStep, Plan, PlanPart, SavePart

if TYPE_CHECKING:
    from layerflow.server.handoffs.follows import Follows, PendingFollow
    from layerflow.server.handoffs.registry import Handoffs
    from layerflow.server.sources import Sources
    from layerflow.server.tier.fetches import PendingFetch

MAX_STEP_S = 86_400.0

Adopt = Callable[[Sequence[NewObject], Owner], Mapping[bytes, int]]
"""Takes room over that a hand-off has kept: of those objects that have some, where it is."""


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


@dataclass(slots=True)
class Wanted:
    """A checked part of an OpenStep; of loads also whether the last object is a tail, and what it follows (a key)."""

    request: str
    group: int
    keys: list[bytes]
    counts: np.ndarray
    tail: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """An OpenStep that agrees with itself and with the session's spec.

    :param nbytes: bytes that it asks to be loaded and saved.
    """

    loads: list[Wanted]
    saves: list[tuple[Wanted, list[NewObject]]]
    nbytes: int


def check_step(spec: ModelSpec, message: OpenStep) -> Generator[None, None, CheckedStep]:
    """In slices: it stops every so many objects, and returns the checked step. Changes nothing.

    :raises ProtocolError: the message contradicts itself or the session's spec.
    """
    loads, saves = [], []
    nbytes = since = 0
    for part in message.loads:
        loads.append(check_load(part, spec))
        nbytes += _moved(spec, loads[-1])
        since += len(loads[-1].keys)
        if since >= SLICE_KEYS:
            yield
            since = 0
    for saved in message.saves:
        wanted = check_part(saved, spec)
        objects = yield from new_objects(saved, spec)
        saves.append((wanted, objects))
        nbytes += _moved(spec, wanted)
        since += len(objects)
        if since >= SLICE_KEYS:
            yield
            since = 0
    return CheckedStep(loads, saves, nbytes)


def count_objects(message: OpenStep) -> int:
    """Objects that the message names, repeats included."""
    nbytes = sum(len(part.digests) for part in message.loads) + sum(len(part.digests) for part in message.saves)
    return nbytes // DIGEST_BYTES


def _moved(spec: ModelSpec, wanted: Wanted) -> int:
    group = spec.groups[wanted.group]
    return int(wanted.counts.sum()) * group.bytes_per_block * len(group.layers)


def plan_step(
    pool: Pool,
    tier: Sources | None,
    session: ClientSession,
    message: OpenStep,
    checked: CheckedStep,
    replicas: Sequence[Replica],
    missed: MissedTurns,
    handoffs: Handoffs,
    follows: Follows,
) -> Opening:
    """Pin the objects to load, reserve room for those to save, and number the blocks.

    What the arena lacks is fetched from the tier.

    :param replicas: per group, which of the workers that hold the same heads this one is: they take turns in storing.
    :param missed: what another one has not stored in its turn.
    :param handoffs: those of the worker's engine have room for what they wait for.
    :param follows: what another step is still storing, for requests that may wait for it.
    """
    spec = session.spec
    assert spec is not None
    loads, saves = checked.loads, checked.saves
    book = StepBook(("step", session.number, message.step), in_turns=any(each.copies > 1 for each in replicas))
    load_plan, load_parts, bad, covered = (
        _take_over(pool, session, book, message, loads)
        if message.planned
        else _plan_loads(pool, tier, session, book, loads, message.deadline, handoffs, follows)
    )
    save_plan, save_parts, full, placed = _plan_saves(
        pool, book, saves, bad, replicas, missed, functools.partial(handoffs.adopt, session.engine)
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
    if tier is not None:
        for group, (objects, parts) in placed.items():
            events += tier.plan(
                (session.number, message.step), session.engine, group, len(spec.groups[group].layers), objects, parts
            )
    for group, (objects, parts) in placed.items():
        saved = {new.key: part for (new, _), part in zip(objects, parts, strict=True)}
        events += follows.adopted((session.number, message.step), group, saved)
    # Objects that other ranks load too stay leased for them, until the lease ends.
    loaded = [(wanted.request, wanted.keys) for wanted in loads if spec.shard.copy_of(wanted.group).copies == 1]
    urgent = any(part.promised for part in save_parts)
    plan = Plan(message.step, load_plan, save_plan, covered, urgent)
    return Opening(events, plan, book, loaded, full, len(bad))


def _plan_loads(
    pool: Pool,
    tier: Sources | None,
    session: ClientSession,
    book: StepBook,
    loads: list[Wanted],
    deadline: float,
    handoffs: Handoffs,
    follows: Follows,
) -> tuple[list[PlanPart], list[Part], set[str], list[Covered]]:
    spec = session.spec
    assert spec is not None
    # A pin outlives the deadline by far: it ends with the step, and only a lost server forgets it.
    located = [pool.acquire(wanted.keys, book.owner, deadline + MAX_STEP_S) for wanted in loads]
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
                covered.append(Covered(place.offset, [list(box) for box in boxes], list(pieces)))
            offsets.append(source.offset)
            stored.append(source.blocks)
            objects.append((at + blocks, key))
            blocks += count
        numbered[wanted.group] = at + blocks
        plans.append(PlanPart(codec.pack_u64(offsets), codec.pack_u32(stored)))
        if blocks:
            parts.append(Part(wanted.request, wanted.group, blocks, tuple(needs)))
    return plans, parts, bad, covered


def _take_over(
    pool: Pool, session: ClientSession, book: StepBook, message: OpenStep, loads: list[Wanted]
) -> tuple[list[PlanPart], list[Part], set[str], list[Covered]]:
    """The step pins what the plans of its hits do; its worker has begun to move it.

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


def _plan_saves(
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


def check_deadlines(message: OpenStep, now: float, most_s: float) -> None:
    """:raises ProtocolError: they are not in order, or more than `most_s` seconds ahead of `now`, or a day past."""
    if not now - MAX_STEP_S < message.deadline <= message.save_deadline <= now + most_s:
        raise ProtocolError(
            f"step {message.step}: deadlines {message.deadline}, {message.save_deadline} must be ascending seconds on "
            f"CLOCK_MONOTONIC, at most server.max_deadline_s = {most_s:g} ahead of now = {now:.3f}"
        )


def check_part(part: LoadPart | SavePart, spec: ModelSpec) -> Wanted:
    """:raises ProtocolError: no such group, or objects without a size that they can have."""
    where = f"request {part.request!r}, group {part.group}"
    if not 0 <= part.group < len(spec.groups):
        raise ProtocolError(f"{where}: the session's spec has groups 0 to {len(spec.groups) - 1}")
    digests = codec.split_digests(part.digests, where)
    counts = codec.unpack_u32(part.counts, len(digests), f"{where}, counts")
    most = spec.chunk_tokens // spec.groups[part.group].block_size
    if not digests or counts.min() < 1 or counts.max() > most:
        raise ProtocolError(f"{where}: a part has at least one object, and each 1 to {most} blocks")
    return Wanted(part.request, part.group, [object_key(d, part.group, spec.shard) for d in digests], counts)


def check_load(part: LoadPart, spec: ModelSpec) -> Wanted:
    """:raises ProtocolError: as of :func:`check_part`, or a tail that is none."""
    wanted = check_part(part, spec)
    if len(part.parent) != (DIGEST_BYTES if part.tail else 0) or not 0 <= part.tail < spec.chunk_tokens:
        raise ProtocolError(
            f"request {part.request!r}, group {part.group}: a tail of {part.tail} tokens after a parent of "
            f"{len(part.parent)} bytes; a tail has 1 to {spec.chunk_tokens - 1} tokens and a parent of "
            f"{DIGEST_BYTES} bytes, or there is neither"
        )
    if part.tail:
        wanted.tail, wanted.parent = part.tail, object_key(part.parent, part.group, spec.shard)
    return wanted


def new_objects(part: SavePart, spec: ModelSpec) -> Generator[None, None, list[NewObject]]:
    """In slices, as :func:`check_step`.

    :raises ProtocolError: token counts that a chunk cannot have, or a tail without its parent."""
    where = f"request {part.request!r}, group {part.group}"
    if not 0 <= part.group < len(spec.groups):
        raise ProtocolError(f"{where}: the session's spec has groups 0 to {len(spec.groups) - 1}")
    group: GroupSpec = spec.groups[part.group]
    digests = codec.split_digests(part.digests, where)
    tokens = codec.unpack_u32(part.tokens, len(digests), f"{where}, tokens")
    counts = codec.unpack_u32(part.counts, len(digests), f"{where}, counts")
    if len(part.parent) not in (0, DIGEST_BYTES):
        raise ProtocolError(f"{where}: parent must be empty or {DIGEST_BYTES} bytes")
    unit = spec.block_tokens
    sizes = [held // unit * DIGEST_BYTES if unit else 0 for held in tokens.tolist()]
    if part.block_digests and len(part.block_digests) != sum(sizes):
        raise ProtocolError(
            f"{where}: {len(part.block_digests)} bytes of block digests; {sum(sizes)} belong to its objects, or none"
        )
    # Found by those of the first group and shard, or of a rank that holds the same; the others' would say the same.
    named = covered_by(0, spec.shard) == covered_by(0, spec.shard.peers()[0])
    indexed = bool(part.block_digests) and not part.group and named
    at = 0
    objects = []
    for position, (digest, held, blocks) in enumerate(zip(digests, tokens.tolist(), counts.tolist(), strict=True)):
        if position % SLICE_KEYS == SLICE_KEYS - 1:
            yield
        partial = held != spec.chunk_tokens
        last = position == len(digests) - 1
        if held > spec.chunk_tokens or held < 1 or (partial and not (last and part.parent)):
            raise ProtocolError(
                f"{where}, object {position}: {held} tokens; every chunk but a last one with a parent holds "
                f"{spec.chunk_tokens}"
            )
        if blocks != len(group.rules.keep(held)):
            raise ProtocolError(
                f"{where}, object {position}: {blocks} blocks for {held} tokens, a {group.kind} group keeps "
                f"{len(group.rules.keep(held))}"
            )
        parent = object_key(part.parent, part.group, spec.shard) if partial else b""
        own = part.block_digests[at : at + sizes[position]] if indexed else b""
        at += sizes[position]
        key = object_key(digest, part.group, spec.shard)
        objects.append(NewObject(key, object_bytes(group, blocks), blocks, held, parent, own))
    return objects

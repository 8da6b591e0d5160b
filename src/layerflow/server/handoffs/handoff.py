"""One hand-off: its states, the objects that it keeps, and who wants to hear of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layerflow.keys import DIGEST_BYTES, covered_by, object_key
from layerflow.kinds import Kind
from layerflow.lives import Life
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.pool.chunk_index import ChunkIndex
from layerflow.server.account import Charge
from layerflow.spec import ModelSpec, first_mismatch, model_facts


class HandoffStatus(enum.Enum):
    """Where a hand-off is, as the wire and the metrics call it. :data:`HANDOFF_LIFE` says what each means."""

    ANNOUNCED = "announced"
    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"
    REVOKED = "revoked"
    RELEASED = "released"

    @property
    def readable(self) -> bool:
        """A reader may count on it."""
        return self in (HandoffStatus.OPEN, HandoffStatus.COMPLETE)


_OVER = (HandoffStatus.FAILED, HandoffStatus.REVOKED, HandoffStatus.RELEASED)
HANDOFF_LIFE = Life(
    "a hand-off",
    {
        HandoffStatus.ANNOUNCED: (
            "a reader has asked for it, and no engine has opened it yet, or is opening it",
            (HandoffStatus.OPEN, *_OVER),
        ),
        HandoffStatus.OPEN: (
            "its engine computes, and all of it is stored or has room",
            (HandoffStatus.COMPLETE, *_OVER),
        ),
        HandoffStatus.COMPLETE: ("all of it is stored", (HandoffStatus.REVOKED, HandoffStatus.RELEASED)),
        HandoffStatus.FAILED: ("it was not opened, or some of it never will be stored", ()),
        HandoffStatus.REVOKED: (
            "the server took it back: nobody came for it in time, others needed its room, or the pool was purged",
            (),
        ),
        HandoffStatus.RELEASED: ("nobody needs it any more", ()),
    },
)


@dataclass(frozen=True, slots=True)
class HandoffStatistics:
    """A snapshot. The first half is now, sizes in bytes; the second counts since the server's start.

    :param kept_bytes: what hand-offs that are not over pin or reserve.
    """

    announced: int
    open: int
    complete: int
    kept_bytes: int
    opened: int
    completed: int
    claimed: int
    failed: int
    revoked: int
    refused: int
    released: int


REMEMBERED = 4096
"""Hand-offs that are over and can still be asked about: the last so many."""

Told = Callable[["HandoffRecord"], None]


@dataclass(slots=True, eq=False)
class HandoffRecord:
    """One hand-off. Times are monotonic seconds.

    :param serial: tells it from an earlier one of the same name.
    :param engine: that computes it; empty while it is announced.
    :param session: of the client that opened it. :param key: of that client; "" = it is of this machine.
    :param due: it has failed if it is not complete by then.
    :param spec: of a worker of that engine.
    :param tokens: that a reader can load at most.
    :param objects: what it keeps. :param partial: those of them that are partial chunks.
    :param parts_held: of the model, that they hold; see :func:`layerflow.keys.covered_by`.
    :param pending: keys of it that are not stored.
    :param reserved_here: those of them that this hand-off keeps room for.
    :param reserved_there: those that another hand-off keeps room for, until a step saves them.
    :param given_up: why a save of it was given up last; empty = none was.
    :param stored_by_others: those that somebody else brings into the arena, whose end nobody tells of.
    :param ended: its engine computes nothing more of it.
    :param parts: how many other servers keep parts of it that are not complete.
    :param claims: readers that have come for it.
    :param watchers: told of its next state.
    :param charge: what the client that opened it is charged for it.
    """

    name: str
    serial: int
    status: HandoffStatus = HandoffStatus.ANNOUNCED
    engine: str = ""
    session: int = 0
    key: str = ""
    due: float = 0.0
    spec: ModelSpec | None = None
    tokens: int = 0
    lease_s: float = 0.0
    reason: str = ""
    ended: bool = False
    parts: int = 0
    claims: int = 0
    objects: dict[bytes, NewObject] = field(default_factory=dict)
    partial: ChunkIndex = field(default_factory=ChunkIndex)
    parts_held: set[bytes] = field(default_factory=set)
    pending: set[bytes] = field(default_factory=set)
    reserved_here: set[bytes] = field(default_factory=set)
    reserved_there: set[bytes] = field(default_factory=set)
    given_up: str = ""
    stored_by_others: set[bytes] = field(default_factory=set)
    watchers: dict[Told, None] = field(default_factory=dict)
    charge: Charge | None = None

    @property
    def unsaved(self) -> int:
        """How many of its objects have room, and no step has begun to save them."""
        return len(self.reserved_here) + len(self.reserved_there)

    @property
    def owner(self) -> Owner:
        """The owner of its pins and reservations in the pool."""
        return ("handoff", self.name, self.serial)

    def keep(self, objects: Mapping[bytes, NewObject]) -> None:
        """Keep these, too."""
        self.objects.update(objects)
        for new in objects.values():
            if new.parent:
                self.partial.add(new.key, new.tokens, new.parent)
        self.parts_held.update(key[DIGEST_BYTES:] for key in objects)

    def enter(self, status: HandoffStatus) -> None:
        """:raises InvalidTransition: where its life does not allow it."""
        HANDOFF_LIFE.check(self.status, status, repr(self.name))
        self.status = status

    def story(self) -> str:
        """The state, and why, as a reader is told it."""
        return f"{self.status.value}: {self.reason}" if self.reason else self.status.value


# What a hand-off keeps: the objects that a hit of its whole prompt needs, and their room; why readers find none.


def needed_chunks(rules: Kind, tokens: int, chunk_tokens: int) -> range:
    """Chunks of a group that a hit of the first `tokens` tokens needs, by a reader that computes one more or the last.

    :param tokens: at least 1.
    """
    own = rules.need(tokens, chunk_tokens)
    return own if rules.exact else range(rules.need(tokens - 1, chunk_tokens).start, own.stop)


OBJECTS_PER_SLICE = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that a hand-off is about.

    :param root: digest before the first chunk.
    :param digests: of the full chunks. :param tail: of the partial chunk behind them; empty = there is none.
    """

    root: bytes
    digests: Sequence[bytes]
    tail: bytes
    tokens: int

    def nbytes(self, specs: Iterable[ModelSpec]) -> int:
        """What :meth:`objects` keep in the arena, counted without making them."""
        total, counted = 0, set()
        for spec in specs:
            for number, group in enumerate(spec.groups):
                if (part := covered_by(number, spec.shard)) in counted:
                    continue
                counted.add(part)
                chunks = needed_chunks(group.rules, self.tokens, spec.chunk_tokens)
                tail = len(self.digests) in chunks
                full = object_bytes(group, len(group.rules.keep(spec.chunk_tokens)))
                total += (len(chunks) - tail) * full
                if tail:
                    held = self.tokens - len(self.digests) * spec.chunk_tokens
                    total += object_bytes(group, len(group.rules.keep(held)))
        return total

    def objects(self, specs: Iterable[ModelSpec]) -> Iterator[dict[bytes, NewObject]]:
        """By key, what the workers of an engine store of it and a reader needs, some at a time.

        :param specs: of the workers; those that hold the same share their objects.
        """
        made: dict[bytes, None] = {}
        few: dict[bytes, NewObject] = {}
        for spec in specs:
            for number, group in enumerate(spec.groups):
                for chunk in needed_chunks(group.rules, self.tokens, spec.chunk_tokens):
                    partial = chunk == len(self.digests)
                    held = self.tokens - chunk * spec.chunk_tokens if partial else spec.chunk_tokens
                    key = object_key(self.tail if partial else self.digests[chunk], number, spec.shard)
                    if key in made:
                        continue
                    before = self.digests[chunk - 1] if chunk else self.root
                    parent = object_key(before, number, spec.shard) if partial else b""
                    blocks = len(group.rules.keep(held))
                    made[key] = None
                    few[key] = NewObject(key, object_bytes(group, blocks), blocks, held, parent)
                    if len(few) >= OBJECTS_PER_SLICE:
                        yield few
                        few = {}
        if few:
            yield few


def distinct(specs: Iterable[ModelSpec]) -> list[ModelSpec]:
    """One spec for each part of the model that some worker holds."""
    by_part: dict[tuple[bytes, ...], ModelSpec] = {}
    for spec in specs:
        by_part.setdefault(tuple(covered_by(group, spec.shard) for group in range(len(spec.groups))), spec)
    return list(by_part.values())


def model_mismatch(mine: ModelSpec, theirs: ModelSpec) -> str:
    """Return the first fact in which two engines' models differ, so that neither reads the other's objects; "" = none.

    :param mine: of the engine that reads. :param theirs: of the one that stores.
    """
    found = first_mismatch(model_facts(mine), model_facts(theirs))
    return f"{found[0]}: {found[1]} here, {found[2]} there" if found is not None else ""


class Reserved(NamedTuple):
    """Keys of a hand-off's objects.

    :param pending: those that are not stored yet. The others are some of them.
    :param reserved_here: with room that is reserved here. :param reserved_there: for which another hand-off keeps room.
    :param stored_by_others: those whose writer does not report its end.
    """

    pending: set[bytes]
    reserved_here: set[bytes]
    reserved_there: set[bytes]
    stored_by_others: set[bytes]


def take(pool: Pool, owner: Owner, objects: Mapping[bytes, NewObject]) -> Reserved | None:
    """Pin what is stored of these and reserve room for what nobody writes. None: there is no room, nothing is taken.

    What `owner` has pinned and reserved before stays its own.
    """
    # Pinned by another name until there is room: `owner` may pin the same, as pieces of what it took before.
    taking = ("taking", owner)
    try:
        places = pool.acquire(list(objects), taking, math.inf)
        missing = [new for new, place in zip(objects.values(), places, strict=True) if place is None]
        room = pool.reserve(missing, owner)
        if any(place.outcome in (ReserveStatus.FULL, ReserveStatus.TOO_LARGE) for place in room):
            pool.revoke([new.key for new in missing], owner)
            return None
        pool.transfer_pins(taking, owner, math.inf)
    finally:
        pool.release(taking)  # nobody else would: these pins have no end
    reserved = zip(missing, room, strict=True)
    reserved_here = {new.key for new, place in reserved if place.outcome is ReserveStatus.RESERVED}
    pending = {new.key for new in missing}
    by_writer = sort_by_writer(pool, pending - reserved_here)
    return Reserved(pending, reserved_here, *by_writer)


def sort_by_writer(pool: Pool, keys: Iterable[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Of objects that somebody else is to store: those that a hand-off keeps room for, and those of whose end nobody
    tells. Of the others, steps tell.
    """
    reserved_there, untold = set(), set()
    for key in keys:
        writer = pool.writer(key)
        kind = writer[0] if isinstance(writer, tuple) else None
        if kind == "handoff":
            reserved_there.add(key)
        elif kind != "step":
            untold.add(key)
    return reserved_there, untold

"""The book of objects that loads take while a step stores them, or before one does.

What moves when, and what is given up, is the core's (:mod:`layerflow.flow.arrivals.follows`). Here is what the core
does not know: which objects they are, where they lie in the arena, and whose their room is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from layerflow.flow.commands import Arrived, LayersStored, ObjectsLost, TransferDone, Vacate
from layerflow.flow.events import Event, FollowLent, FollowLost, FollowMoved, FollowOpened
from layerflow.pool.base import Owner, Pool
from layerflow.system.numbers import ascending

StepKey = tuple[int, int]
FollowCommand = Arrived | ObjectsLost | Vacate | TransferDone | LayersStored
ALLOWED_S = 600.0
"""How long after its lookup a request's steps may follow what it has hit."""


@dataclass(slots=True, eq=False)
class FollowJob:
    """One follow.

    :param keys: by position, as the core knows them.
    :param layers: the model's layer numbers of their group.
    :param promised: no step saves them yet.
    :param lent: keys that other servers read. :param stored: so many leading layers of it are.
    :param held: positions whose room a load may still read although nobody will store them.
    """

    number: int
    keys: list[bytes]
    layers: tuple[int, ...]
    promised: bool
    done: bool = False
    held: set[int] = field(default_factory=set)
    lent: set[bytes] = field(default_factory=set)
    stored: int = 0

    @property
    def owner(self) -> Owner:
        """Whose the room of what was given up is, until no load touches it."""
        return ("follow", self.number)


class PendingFollow(NamedTuple):
    """An object that is followed: its room in the arena, and its place in the follow."""

    offset: int
    blocks: int
    job: FollowJob
    position: int


class LentListener(Protocol):
    """Who lends objects that are being stored. Called on the loop."""

    def lent_stored(self, keys: Sequence[bytes], layers: int) -> None:
        """So many leading layers of these are stored."""

    def lent_whole(self, keys: Sequence[bytes]) -> None:
        """These are complete."""

    def lent_lost(self, keys: Sequence[bytes], reason: str) -> None:
        """These will not be."""


class Follows:
    """All follows of a server.

    :param emit: gives events to the core, which answers with the commands that are given here.
    :param part_of: of an object that a step saves, the position of its save part; None = the step saves it no more.
    """

    def __init__(
        self,
        pool: Pool,
        emit: Callable[[Sequence[Event]], None],
        part_of: Callable[[StepKey, bytes], int | None],
    ) -> None:
        self._pool = pool
        self._emit = emit
        self._part_of = part_of
        self._numbers = ascending()
        self._jobs: dict[int, FollowJob] = {}
        self._coming: dict[bytes, PendingFollow] = {}
        self._held: dict[bytes, tuple[FollowJob, int]] = {}
        # Soonest to end first: all last equally long. Thousands of requests are in it, and few end in a round.
        self._allowed: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.objects = 0
        self.listener: LentListener | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def coming_objects(self) -> int:
        """Objects that may still be stored."""
        return len(self._coming)

    # Whose requests may follow -------------------------------------------------------------------

    def allow(self, engine: str, request: str, now: float) -> None:
        """This request has hit what is still to be stored: its steps may wait for that."""
        self._allowed.pop((engine, request), None)
        self._allowed[engine, request] = now + ALLOWED_S

    def disallow(self, engine: str, request: str) -> None:
        """Its hit was dropped."""
        self._allowed.pop((engine, request), None)

    def allowed(self, engine: str, request: str) -> bool:
        """May the request's steps wait for what is not stored?"""
        return (engine, request) in self._allowed

    def expire(self, now: float) -> None:
        """Forget requests that looked up long ago."""
        while self._allowed and next(iter(self._allowed.values())) <= now:
            self._allowed.popitem(last=False)

    # Loads ---------------------------------------------------------------------------------------

    def open(self, keys: Iterable[bytes], group: int, layers: Sequence[int]) -> None:
        """Follow these objects of one group, as far as somebody stores them or keeps room; see :meth:`coming`.

        :param layers: the model's layer numbers of the group.
        """
        saved: dict[StepKey, dict[bytes, int]] = {}
        promised: list[bytes] = []
        for key in keys:
            writer = self._pool.writer(key) if key not in self._held else None
            match writer:
                case ("step", int(session), int(step)):
                    part = self._part_of((session, step), key)
                    if part is not None:
                        saved.setdefault((session, step), {})[key] = part
                case ("handoff", _, _):
                    promised.append(key)
        events: list[Event] = [self._follow(parts, group, layers, step) for step, parts in saved.items()]
        if promised:
            job = self._begin(promised, layers, promised=True)
            events.append(FollowOpened(job.number, job.layers, len(promised)))
        self._emit(events)

    def coming(self, key: bytes) -> PendingFollow | None:
        """An object's place while it may still be stored."""
        return self._coming.get(key)

    # Other servers -------------------------------------------------------------------------------

    def lend(self, keys: Sequence[bytes], group: int, layers: Sequence[int]) -> list[PendingFollow | None]:
        """Follow these for another server, as far as somebody stores them or keeps room, until :meth:`give_back`."""
        self.open([key for key in keys if key not in self._coming], group, layers)
        found = [self._coming.get(key) for key in keys]
        first: dict[FollowJob, None] = {}
        for key, pending in zip(keys, found, strict=True):
            if pending is not None:
                if not pending.job.lent:
                    first[pending.job] = None
                pending.job.lent.add(key)
        self._emit([FollowLent(job.number, True) for job in first])
        return found

    def give_back(self, keys: Iterable[bytes]) -> None:
        """No other server reads these any more."""
        gone = set(keys)
        over = []
        for job in self._jobs.values():
            if job.lent & gone:
                job.lent -= gone
                if not job.lent:
                    over.append(FollowLent(job.number, False))
        self._emit(over)

    # Saves ---------------------------------------------------------------------------------------

    def adopted(self, step: StepKey, group: int, parts: Mapping[bytes, int]) -> list[Event]:
        """A step saves these objects of one group now: what the core is told once it knows of the step.

        :param parts: of each object, its position in the step's saves.
        """
        by_job: dict[FollowJob, dict[int, bytes]] = {}
        for key in parts:
            pending = self._coming.get(key)
            if pending is not None and pending.job.promised:
                by_job.setdefault(pending.job, {})[pending.position] = key
        events: list[Event] = []
        for job, mine in by_job.items():
            for position in mine:
                job.held.discard(position)
            opened = self._follow({key: parts[key] for key in mine.values()}, group, job.layers, step)
            lent = job.lent & set(mine.values())
            if lent:
                self._jobs[opened.follow].lent, opened = lent, replace(opened, lent=True)
                job.lent -= lent
                if not job.lent:
                    events.append(FollowLent(job.number, False))
            events += [opened, FollowMoved(job.number, tuple(mine), opened.follow)]
        return events

    def withdraw(self, keys: Sequence[bytes], owner: Owner, reason: str) -> None:
        """Nobody will store these, for which `owner` has room: it returns once no load touches it."""
        free = [key for key in keys if key not in self._held]
        if free:
            self._pool.revoke(free, owner)
        lost: dict[FollowJob, list[int]] = {}
        for key in keys:
            if key in self._held:
                job, position = self._held[key]
                self._pool.transfer([key], owner, job.owner)
                if job.promised and key in self._coming:
                    lost.setdefault(job, []).append(position)
        self._emit([FollowLost(job.number, tuple(positions), reason) for job, positions in lost.items()])

    # The core ------------------------------------------------------------------------------------

    def obey(self, command: FollowCommand) -> None:
        """What has become true of a follow."""
        match command:
            case ObjectsLost() | TransferDone():
                number = command.transfer
            case LayersStored():
                number = command.follow
            case _:
                number = command.fetch
        job = self._jobs[number]
        match command:
            case Arrived():
                for position in command.objects:
                    key = job.keys[position]
                    del self._coming[key]
                    del self._held[key]
                    job.held.discard(position)
                self._tell_whole(job, [job.keys[position] for position in command.objects])
                for session, step, objects in command.readers:
                    self._pool.hold([job.keys[position] for position in objects], ("step", session, step), math.inf)
            case ObjectsLost():
                for position in command.objects:
                    self._coming.pop(job.keys[position], None)
                lost = [key for position in command.objects if (key := job.keys[position]) in job.lent]
                if lost and self.listener is not None:
                    self.listener.lent_lost(lost, command.reason)
            case LayersStored():
                job.stored = command.layers
                lent = [key for key in job.keys if key in job.lent and key in self._coming]
                if lent and self.listener is not None:
                    self.listener.lent_stored(lent, command.layers)
            case Vacate():
                for position in command.objects:
                    job.held.discard(position)
                    self._held.pop(job.keys[position], None)
                self._pool.revoke([job.keys[position] for position in command.objects], job.owner)
            case TransferDone():
                job.done = True
        if job.done and not job.held:
            del self._jobs[number]

    # ---------------------------------------------------------------------------------------------

    def _tell_whole(self, job: FollowJob, keys: Sequence[bytes]) -> None:
        lent = [key for key in keys if key in job.lent]
        if lent and self.listener is not None:
            self.listener.lent_whole(lent)

    def _follow(self, parts: Mapping[bytes, int], group: int, layers: Sequence[int], step: StepKey) -> FollowOpened:
        job = self._begin(list(parts), layers, promised=False)
        return FollowOpened(job.number, job.layers, len(parts), *step, group, tuple(parts.values()))

    def _begin(self, keys: list[bytes], layers: Sequence[int], *, promised: bool) -> FollowJob:
        job = FollowJob(-next(self._numbers), keys, tuple(layers), promised)
        self._jobs[job.number] = job
        self.objects += len(keys)
        for position, key in enumerate(keys):
            room = self._pool.room(key)
            assert room is not None
            self._coming[key] = PendingFollow(room.offset, room.blocks, job, position)
            self._held[key] = job, position
            job.held.add(position)
        return job

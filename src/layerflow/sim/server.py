"""What `layerflow run` does for engines, under a virtual clock: the core, the pool, and the books of open steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from layerflow.config.settings import Settings
from layerflow.flow import Flow
from layerflow.flow.commands import Cancel, Command, Commit, LoadFailed, LoadsDone, Revoke, StepDone, Submit, WakeAt
from layerflow.flow.events import (
    SAVE,
    BatchDone,
    BatchFailed,
    Event,
    LayersComputed,
    Limits,
    LoadsMoved,
    Part,
    SessionOpened,
    StepClosed,
    StepOpened,
    StepsRevoked,
    Tick,
)
from layerflow.hits import HitLength, find_hit
from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import NewObject, Owner, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.server.planner import NO_ROOM, step_owner
from layerflow.sim.clock import VirtualClock
from layerflow.sim.worker import SimulatedLoads, SimulatedWorker
from layerflow.spec import ModelSpec

ROOT = bytes(DIGEST_BYTES)
"""What a prompt's first chunk follows."""

Failed = Callable[[str], None]
"""Told of each request whose load has failed."""


@dataclass(frozen=True, slots=True)
class WantedLoad:
    """What of a request's hit a step loads, of one group.

    :param lease: who has leased the hit.
    :param blocks: of all these objects together.
    """

    request: str
    lease: Owner
    group: int
    keys: tuple[bytes, ...]
    blocks: int


def blocks_of(loads: Iterable[WantedLoad]) -> Counter[int]:
    """How many blocks of each group they are."""
    blocks: Counter[int] = Counter()
    for load in loads:
        blocks[load.group] += load.blocks
    return blocks


@dataclass(slots=True)
class OpenStep:
    """What is remembered of an open step.

    :param saves: for each save part, the keys that have room.
    """

    worker: SimulatedWorker
    owner: Owner
    failed: Failed
    saves: list[list[bytes]] = field(default_factory=list)


class SimulatedServer:
    """One server, for all engines of a machine.

    :param settings: its leases and deadlines are kept.
    :param validate: check the core's invariants after every event.
    """

    def __init__(
        self, clock: VirtualClock, limits: Limits, pool: MemoryPool, settings: Settings, *, validate: bool = False
    ) -> None:
        self.flow, self.pool = Flow(limits), pool
        self._clock = clock
        self._lease_s = settings.pool.lease_ms / 1e3
        self._transfer = settings.transfer
        self._validate = validate
        self._numbers = count(1)
        self._workers: dict[int, SimulatedWorker] = {}
        self._steps: dict[tuple[int, int], OpenStep] = {}
        self._wake = math.inf
        self.events = self.failed_loads = 0
        self.full = 0  #: objects that found no room

    def number(self) -> int:
        """The next session's."""
        return next(self._numbers)

    def attach(self, worker: SimulatedWorker) -> None:
        """An engine worker is there."""
        self._workers[worker.session] = worker
        self.handle(SessionOpened(worker.session, worker.shapes()))

    # Lookups -------------------------------------------------------------------------------------

    def lookup(self, spec: ModelSpec, chunks: Sequence[bytes], tokens: int, tail: bytes) -> HitLength:
        """The longest hit of a prompt: of all groups and shards, one token left to compute."""
        self.pool.expire(self._clock.now)
        return find_hit(self.pool, spec, ROOT, list(chunks), tokens, tail_digest=tail)

    def longest_hit(self, spec: ModelSpec, chunks: Sequence[bytes], tokens: int, tail: bytes) -> int:
        """Tokens of the longest hit of a prompt, its own tail's among them."""
        hit = self.lookup(spec, chunks, tokens, tail)
        longest = hit.tokens
        for end, position in hit.ends(spec, tokens):
            found = hit.tails[position] if position >= 0 else None
            if found is None or (found.chunk == len(chunks) and found.digest == tail):
                longest = max(longest, end)
        return longest

    def lease(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Pin what a hit needs until its step opens, or the lease ends."""
        self.pool.lease(keys, owner, self._clock.now + self._lease_s)

    def release(self, owner: Owner) -> None:
        """A hit is not waited for any more."""
        self.pool.release(owner)

    # Steps ---------------------------------------------------------------------------------------

    @property
    def load_deadline(self) -> float:
        """Of the loads of a step that begins now."""
        return self._clock.now + self._transfer.step_timeout_ms / 1e3

    def open_step(
        self,
        worker: SimulatedWorker,
        step: int,
        *,
        loads: Sequence[WantedLoad],
        saves: Sequence[tuple[str, int, list[NewObject]]],
        failed: Failed,
    ) -> list[WantedLoad] | None:
        """Open a step of one worker, whose loads it moves itself.

        A request of which something is not there any more has failed, and nothing of it is saved.

        :param saves: requests, groups and objects.
        :returns: the loads that are there; None: nothing was left to be opened.
        """
        owner = step_owner(worker.session, step)
        gone: set[str] = set()
        for load in loads:
            # Leased past the share that leases may pin: what is still there is pinned now.
            if self.pool.copy_pins(load.lease, load.keys, owner) is None and None in self.pool.acquire(
                load.keys, owner, math.inf
            ):
                gone.add(load.request)
        for request in gone:
            self.failed_loads += 1
            failed(request)
        loads = [load for load in loads if load.request not in gone]
        saves = [saved for saved in saves if saved[0] not in gone]
        if not (loads or saves):
            self.pool.release(owner)
            return None
        book = OpenStep(worker, owner, failed)
        parts: list[Part] = []
        for request, group, objects in saves:
            reserved = self.pool.reserve(objects, owner)
            self.full += sum(room.outcome in NO_ROOM for room in reserved)
            mine = [new for new, room in zip(objects, reserved, strict=True) if room.outcome is ReserveStatus.RESERVED]
            if mine:
                parts.append(Part(request, group, sum(new.blocks for new in mine)))
                book.saves.append([new.key for new in mine])
        self._steps[worker.session, step] = book
        loaded = tuple(Part(load.request, load.group, load.blocks) for load in loads)
        save_deadline = self._clock.now + self._transfer.save_timeout_ms / 1e3
        self.handle(
            StepOpened(
                worker.session, step, self.load_deadline, save_deadline, loaded, tuple(parts), planned=bool(loaded)
            )
        )
        return loads

    def loads_over(self, worker: SimulatedWorker, loads: SimulatedLoads) -> None:
        """Nothing of a step's loads moves any more."""
        self.handle(LoadsMoved(worker.session, loads.step, loads.moved))

    def saved(self, worker: SimulatedWorker, batch: Submit, computed: int) -> None:
        """A save batch has arrived, when so many layers of its step were computed."""
        self.handle(
            LayersComputed(batch.session, batch.step, computed),
            BatchDone(batch.session, batch.batch),
        )

    def close_step(self, worker: SimulatedWorker, step: int) -> None:
        """The forward pass is over."""
        self.handle(StepClosed(worker.session, step, ok=True))

    def purge(self) -> None:
        """Empty the arena. What is being saved is given up; what is being loaded is read to its end."""
        self.handle(*(StepsRevoked(session, False, "purged") for session in self._workers))
        self.pool.clear()

    # The core ------------------------------------------------------------------------------------

    def handle(self, *events: Event) -> None:
        """Tell the core, and do what it wants."""
        pending = list(events)
        while pending:
            event = pending.pop(0)
            self.events += 1
            for command in self.flow.handle(event, self._clock.now):
                pending += self._obey(command)
            if self._validate:
                self.flow.validate()

    def _obey(self, command: Command) -> list[Event]:
        match command:
            case Submit():
                self._workers[command.session].submit(command)
            case Commit():
                book = self._steps[command.session, command.step]
                self.pool.commit([key for part in command.parts for key in book.saves[part]], book.owner)
            case Revoke():
                book = self._steps[command.session, command.step]
                self.pool.revoke([key for part in command.parts for key in book.saves[part]], book.owner)
            case LoadFailed():
                self.failed_loads += 1
                self._steps[command.session, command.step].failed(command.request)
            case Cancel():
                worker = self._workers[command.session]
                if command.direction is SAVE:
                    return [
                        BatchFailed(batch.session, batch.batch, command.reason)
                        for batch in worker.drop_saves(command.step)
                    ]
                worker.cut_off(command.step)
            case LoadsDone():
                self.pool.release(self._steps[command.session, command.step].owner)
            case StepDone():
                book = self._steps.pop((command.session, command.step))
                self.pool.drop_owner(book.owner)
                book.worker.forget_saves(command.step)
            case WakeAt():
                self._wake = command.when
                self._clock.at(command.when, self._tick)
        return []

    def _tick(self) -> None:
        if self._clock.now >= self._wake:  # else another time was asked for since
            self._wake = math.inf
            self.handle(Tick())

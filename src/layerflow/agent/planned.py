"""Steps whose loads are planned by their hits: they begin without a message, and go on where their server has died."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog

from layerflow.agent.descriptors import Numbered, PartDescriptor
from layerflow.agent.ending import StepEnds
from layerflow.agent.hit_plan import columns_of
from layerflow.agent.lanes.load import LayerShape, LoadLane, PlannedLoads
from layerflow.agent.lanes.task import EmulatedLink
from layerflow.agent.link import ReportBuffer
from layerflow.agent.mapping import Arenas, KnownArena
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.step.loads import Residents
from layerflow.agent.step.step import Step
from layerflow.device.base import Device
from layerflow.objects import HEADER_BYTES
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import ModelSpec
from layerflow.wire.messages import Moved, PlanPart
from layerflow.wire.packing import pack_u32

# Loads that need no answer of the server: where their objects lie, by the plans of their hits.


class Placed(NamedTuple):
    """A step's loads.

    :param parts: what the server would have planned.
    """

    arena: KnownArena
    residents: Residents
    parts: list[PlanPart]


class Placing:
    """For one worker.

    :param spec: its.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._columns = columns_of(spec)
        self._keep = [group.rules.keep for group in spec.groups]
        self._chunk = spec.chunk_tokens
        self._full = [len(keep(spec.chunk_tokens)) for keep in self._keep]

    def place(self, loads: Sequence[PartDescriptor], arena: KnownArena) -> Placed | None:
        """None: not all of them are there, in this arena and in one piece."""
        parts: list[PlanPart] = []
        rows: list[np.ndarray] = []
        for part in loads:
            places = part.places
            if places is None or places.incarnation != arena.incarnation or len(places.rows) != len(part.pieces):
                return None
            own = places.of_worker(self._columns[part.group])
            if own is None:
                return None
            rows.append(own)
            parts.append(PlanPart(own[:, 0].tobytes(), pack_u32(self._stored(part))))
        every = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if every[:, 0].max() > arena.memory.nbytes - HEADER_BYTES or (every[:, 0] & 7).any():
            return None
        residents = Residents(arena.memory, every)
        return Placed(arena, residents, parts) if residents.there else None

    def _stored(self, part: PartDescriptor) -> list[int]:
        """Blocks per layer of each object."""
        full, keep = self._full[part.group], self._keep[part.group]
        stored = [full] * len(part.pieces)
        if part.pieces[-1].tokens != self._chunk:  # only a last one is shorter
            stored[-1] = len(keep(part.pieces[-1].tokens))
        return stored


log = structlog.get_logger("layerflow.agent")


class PlannedSteps:
    """Where bytes move, the load lane cuts them into batches. What is in a step's books stays with the step.

    :param lane: of the loads.
    :param ends: ends steps.

    :ivar arenas: guarded by the open steps' lock.
    :ivar link: emulated or not, that loads pass.
    """

    def __init__(
        self, memory: PagedMemory, device: Device, open_steps: OpenSteps, lane: LoadLane, ends: StepEnds
    ) -> None:
        self.arenas = Arenas(device)
        self.link = EmulatedLink(0, 0)
        self._memory = memory
        self._open_steps = open_steps
        self._lane = lane
        self._ends = ends
        self._placing = Placing(memory.spec)
        self._undecided: KnownArena | None = None
        self._groups = len(memory.spec.groups)
        self._layers = [
            LayerShape(layer, group, memory.spec.groups[group].bytes_per_block)
            for layer, (group, _) in enumerate(memory.spec.layer_places())
        ]

    # -- the engine's thread ----------------------------------------------------------------------

    def place(self, loads: Sequence[PartDescriptor]) -> Placed | None:
        """Where all of these loads' objects are, by the plans of their hits; None: the server is to be asked."""
        if not loads or self._lane.planned.caps.window < 1:
            return None
        first = loads[0].places
        arena = self.arenas.get(first.incarnation) if first is not None else None
        return self._placing.place(loads, arena) if arena is not None else None

    def bind(self, step: Step, placed: Placed) -> PlannedLoads:
        """Number the blocks of the step's loads, and cut none of them yet.

        :raises ExtentError: the plan leaves the arena.
        """
        arena = placed.arena

        def lists(group: int, blocks: Numbered) -> BlockList:
            columns = (blocks.engine_blocks, blocks.object_offsets, blocks.object_blocks, blocks.index)
            return BlockList(self._memory, group, arena.memory.nbytes, *columns)

        loads = step.place(placed.residents, placed.parts, lists)
        counts = {group: len(column.numbers) for group, column in loads.items()}
        layers = self._layers if len(counts) == self._groups else [one for one in self._layers if one[1] in counts]
        news = self._ends.link.news
        return PlannedLoads(step, layers, counts, arena.copier, self.link, lambda over: self._moved(over, arena, news))

    def begin(self, loads: PlannedLoads, placed: Placed) -> bool:
        """Let the lane begin; False where the arena is not known any more. The caller holds the open steps' lock."""
        if self.arenas.get(placed.arena.incarnation) is not placed.arena:
            return False
        placed.arena.loading.add(loads.step.number)
        self._lane.plan(loads)
        return True

    # -- servers that go ----------------------------------------------------------------------------

    def abandoned(self, incarnation: int) -> set[int]:
        """A server has hung up: the steps that load from its arena. The caller holds the open steps' lock."""
        self._undecided = self.arenas.abandoned(incarnation)
        return set(self._undecided.loading) if self._undecided is not None else set()

    def orphan(self, step: Step, reason: str) -> None:
        """There is no server for the step, and its loads go on without one: nothing of it is saved."""
        step.announced, step.orphaned = False, True
        step.cut_saves(reason)
        for request in {part.request for part in step.saves}:
            self._open_steps.save_failed(request, reason)
        self._ends.reclaimed()
        self._ends.settle(step)

    def judged(self, dead: bool) -> None:
        """Has its process ended? If not, its plans are worth nothing: a server that is silent may wake up."""
        arena, self._undecided = self._undecided, None
        if arena is None:
            return
        with self._open_steps.lock:
            going_on = set(arena.loading)
            self.arenas.decide(arena, dead, time.monotonic())
        if dead:
            log.info("server_dead", loading_steps=len(going_on))
            return
        for step in self._open_steps.steps():
            if step.number in going_on:
                self._ends.cut(step, "the server is gone")
        self.arenas.let_go(arena)

    def sweep(self, now: float) -> None:
        """Let go of arenas that no plan in use names any more."""
        with self._open_steps.lock:
            late = self.arenas.overdue(now)
        for arena in late:
            self.arenas.let_go(arena)

    def _moved(self, loads: PlannedLoads, arena: KnownArena, news: ReportBuffer) -> None:
        step = loads.step
        assert step.residents is not None
        with self._open_steps.lock:
            arena.loading.discard(step.number)
        news.moved.append(Moved(step.number, loads.moved, loads.lost + step.residents.lost()))
        self._ends.link.ring()
        self._ends.settle(step)

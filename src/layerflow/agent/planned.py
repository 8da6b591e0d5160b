"""Loads whose objects' places the worker knows from their hits: they begin without an answer of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from layerflow.agent.descriptors import Numbered, PartDescriptor
from layerflow.agent.hit_plan import columns_of
from layerflow.agent.lanes.load import WorkerDrivenLoads
from layerflow.agent.lanes.task import EmulatedLink
from layerflow.agent.mapping import KnownArena
from layerflow.agent.step.loads import ObjectGuard
from layerflow.agent.step.step import Step
from layerflow.flow.window import PlannedLayer
from layerflow.objects import HEADER_BYTES
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.wire.messages import PlanPart
from layerflow.wire.packing import pack_u32


class LocatedLoads(NamedTuple):
    """All objects that a step loads, and where they lie.

    :param residents: checks that the objects stay there.
    :param parts: what the server would have planned.
    """

    arena: KnownArena
    residents: ObjectGuard
    parts: list[PlanPart]


class LoadLocator:
    """Finds a step's objects by the plans of their hits, and gives its blocks their places."""

    def __init__(self, memory: PagedMemory) -> None:
        spec = memory.spec
        self._memory = memory
        self._columns = columns_of(spec)
        self._keep = [group.rules.keep for group in spec.groups]
        self._chunk = spec.chunk_tokens
        self._full = [len(keep(spec.chunk_tokens)) for keep in self._keep]
        self._groups = len(spec.groups)
        self._layers = [
            PlannedLayer(layer, group, spec.groups[group].bytes_per_block)
            for layer, (group, _) in enumerate(spec.layer_places())
        ]

    def locate_loads(self, loads: Sequence[PartDescriptor], arena: KnownArena) -> LocatedLoads | None:
        """Locate the objects of all these loads; None: not all of them are in this arena, each in one piece."""
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
        residents = ObjectGuard(arena.memory, every)
        return LocatedLoads(arena, residents, parts) if residents.there else None

    def _stored(self, part: PartDescriptor) -> list[int]:
        """Blocks per layer of each object."""
        full, keep = self._full[part.group], self._keep[part.group]
        stored = [full] * len(part.pieces)
        if part.pieces[-1].tokens != self._chunk:  # only a last one is shorter
            stored[-1] = len(keep(part.pieces[-1].tokens))
        return stored

    def bind(
        self, step: Step, located: LocatedLoads, link: EmulatedLink, over: Callable[[WorkerDrivenLoads], None]
    ) -> WorkerDrivenLoads:
        """Number the blocks of the step's loads. The load lane cuts them into batches later.

        :param link: emulated or not, that the loads pass.
        :param over: told once nothing of the loads moves any more.
        :raises ExtentError: the plan leaves the arena.
        """
        arena = located.arena

        def lists(group: int, blocks: Numbered) -> BlockList:
            columns = (blocks.engine_blocks, blocks.object_offsets, blocks.object_blocks, blocks.index)
            return BlockList(self._memory, group, arena.memory.nbytes, *columns)

        loads = step.place(located.residents, located.parts, lists)
        counts = {group: len(column.numbers) for group, column in loads.items()}
        layers = self._layers if len(counts) == self._groups else [one for one in self._layers if one[1] in counts]
        return WorkerDrivenLoads(step, layers, counts, copier=arena.copier, link=link, over=over)

"""Loads that need no answer of the server: where their objects lie, by the plans of their hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerflow.agent.connection.arenas import KnownArena
from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.hit_plan import columns_of
from layerflow.agent.step.residents import Residents
from layerflow.objects import HEADER_BYTES
from layerflow.spec import ModelSpec
from layerflow.wire.messages import PlanPart
from layerflow.wire.packing import pack_u32


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

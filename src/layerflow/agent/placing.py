"""Loads that need no answer of the server: where their objects lie, by the plans of their hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerflow.agent.connection.arenas import KnownArena
from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.step.residents import Residents
from layerflow.objects import HEADER_BYTES
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire.messages import PlanPart


class Placed(NamedTuple):
    """A step's loads.

    :param parts: what the server would have planned.
    """

    arena: KnownArena
    residents: Residents
    parts: list[PlanPart]


def place(spec: ModelSpec, loads: Sequence[PartDescriptor], arena: KnownArena) -> Placed | None:
    """None: not all of them are there, in this arena and in one piece."""
    parts: list[PlanPart] = []
    rows: list[np.ndarray] = []
    for part in loads:
        places = part.places
        if places is None or places.incarnation != arena.incarnation or len(places.rows) != len(part.pieces):
            return None
        own = places.of_worker(spec, part.group)
        if own is None:
            return None
        keep = spec.groups[part.group].rules.keep
        held = {piece.tokens: 0 for piece in part.pieces}
        for tokens in held:
            held[tokens] = len(keep(tokens))
        rows.append(own)
        parts.append(PlanPart(own[:, 0].tobytes(), codec.pack_u32([held[piece.tokens] for piece in part.pieces])))
    every = rows[0] if len(rows) == 1 else np.concatenate(rows)
    if (every[:, 0] % 8).any() or every[:, 0].max() > arena.memory.nbytes - HEADER_BYTES:
        return None
    residents = Residents(arena.memory, every)
    return Placed(arena, residents, parts) if residents.there else None

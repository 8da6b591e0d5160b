"""A step's objects in the pool, where bytes move past the arena: what of its outline is there, and at which address."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from layerflow.agent.descriptors import PartDescriptor
from layerflow.errors import LayerflowError
from layerflow.hosts.backend import ObjectLocation
from layerflow.keys import object_key
from layerflow.objects import layer_bytes
from layerflow.ops.paged import Int64
from layerflow.places import NOWHERE
from layerflow.spec import ModelSpec
from layerflow.wire.messages import LoadPart, Plan, PlanPart, SavePart
from layerflow.wire.packing import pack_u32, pack_u64, unpack_u64


class LeasedObject(NamedTuple):
    """An object that this worker may read, or write.

    :param gva: address of its header in the pool.
    :param until: end of its lease, monotonic seconds, a margin taken off.
    """

    place: ObjectLocation
    gva: int
    until: float


def places_of(spec: ModelSpec, part: PartDescriptor, owner: int) -> list[ObjectLocation]:
    """The objects of a part's pieces, whole.

    :param owner: what tells one reader of an object from another.
    """
    group = spec.groups[part.group]
    found = []
    for piece in part.pieces:
        tokens, blocks = piece.tokens, len(group.rules.keep(piece.tokens))
        parent = object_key(part.parent, part.group, spec.shard) if tokens != spec.chunk_tokens else b""
        key = object_key(piece.digest, part.group, spec.shard)
        found.append(
            ObjectLocation(key, owner, 0, layer_bytes(group, blocks), len(group.layers), blocks, tokens, parent)
        )
    return found


@dataclass(frozen=True, slots=True)
class LeasedParts:
    """One direction of a step.

    :param parts: of the outline.
    :param held: for each part and piece its object; None = left out.
    :param refused: requests of which something is left out that the pool does not have and will not get, and why.
    """

    parts: Sequence[PartDescriptor]
    held: Sequence[Sequence[LeasedObject | None]]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """The parts of which something is left; the server knows them by their positions in this list."""
        return [at for at, objects in enumerate(self.held) if any(objects)]

    @property
    def lacking(self) -> set[str]:
        """Requests of which something was left out."""
        return {part.request for part, objects in zip(self.parts, self.held, strict=True) if not all(objects)}

    def left(self) -> list[PartDescriptor]:
        """What is left of the parts."""
        return [_reduced(self.parts[at], self.held[at]) for at in self.positions]

    def objects(self, positions: Iterable[int] | None = None) -> list[LeasedObject]:
        """Without duplicates.

        :param positions: only of these parts, as the server knows them.
        """
        parts = self.positions if positions is None else self.parts_of(positions)
        return list(dict.fromkeys(held for at in parts for held in self.held[at] if held is not None))

    def parts_of(self, positions: Iterable[int]) -> list[int]:
        """Positions in the outline, from those that the server knows."""
        told = self.positions
        return [told[position] for position in positions]

    def fill(self, plans: Sequence[PlanPart]) -> list[PlanPart]:
        """The server's plan for the whole outline, with addresses in the pool for its offsets.

        :raises LayerflowError: the plan does not fit what was asked.
        """
        told = self.positions
        if len(plans) != len(told):
            raise LayerflowError(f"the server planned {len(plans)} parts where {len(told)} were asked for")
        offsets = [[NOWHERE] * len(objects) for objects in self.held]
        stored = [[0] * len(objects) for objects in self.held]
        for at, plan in zip(told, plans, strict=True):
            left = [piece for piece, held in enumerate(self.held[at]) if held is not None]
            said = unpack_u64(plan.offsets, len(left), "plan offsets").tolist()
            for piece, offset in zip(left, said, strict=True):
                held = self.held[at][piece]
                if offset != NOWHERE and held is not None:
                    offsets[at][piece], stored[at][piece] = held.gva, held.place.blocks
        return [PlanPart(pack_u64(o), pack_u32(s)) for o, s in zip(offsets, stored, strict=True)]


class StepLeases:
    """Both directions of a step.

    :ivar leased: what it loads still is.
    :ivar room_until: until when room of its saves is surely its own, monotonic seconds: the first end of a lease.
    :ivar published: keys that were, or could not be.
    :ivar over: everything of it was given back.
    """

    def __init__(self, loads: LeasedParts, saves: LeasedParts) -> None:
        self.loads, self.saves = loads, saves
        self.leased, self.published, self.over = True, set[bytes](), False
        self.room_until = min((held.until for held in saves.objects()), default=math.inf)
        self._sorted = sorted({*loads.objects(), *saves.objects()}, key=lambda held: held.gva)
        self._starts = np.array([held.gva for held in self._sorted], dtype=np.int64)
        self._ends = self._starts + np.array([held.place.nbytes for held in self._sorted], dtype=np.int64)

    def messages(self) -> tuple[list[LoadPart], list[SavePart]]:
        """As OpenStep has them."""
        loads, saves = self.loads.left(), self.saves.left()
        return [part.load_message() for part in loads], [part.save_message() for part in saves]

    def fill(self, plan: Plan) -> Plan:
        """See :meth:`LeasedParts.fill`."""
        return Plan(plan.step, self.loads.fill(plan.loads), self.saves.fill(plan.saves))

    def ends(self, gvas: Int64) -> Int64:
        """Where the objects at these addresses end."""
        return self._ends[self._at(gvas)] if self._sorted else gvas

    def holding(self, addresses: Int64) -> list[LeasedObject]:
        """The objects in which these addresses lie."""
        return [self._sorted[at] for at in np.unique(self._at(addresses)).tolist()]

    def _at(self, addresses: Int64) -> Int64:
        found: Int64 = np.searchsorted(self._starts, addresses, side="right") - 1
        return found


def _reduced(part: PartDescriptor, held: Sequence[LeasedObject | None]) -> PartDescriptor:
    pieces = tuple(piece for piece, there in zip(part.pieces, held, strict=True) if there is not None)
    return replace(part, pieces=pieces, parent=part.parent if held[-1] is not None else b"")

"""Where objects lie in an arena, and what a lookup's answer tells of it: a hit's plan."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from layerflow.spec import ModelSpec

NOWHERE = 2**64 - 1
"""The offset of an object that is not there (load) or need not be written (save)."""

PLACE = struct.Struct("<QQ")
"""An object's place in a plan: the offset of its header, and the generation of that place."""

NO_PLACE = PLACE.pack(NOWHERE, 0)
"""Of an object that is not there, that others stand in for, or that is not pinned."""

Places = npt.NDArray[np.uint64]
"""Shape ``(objects, groups, shards, 2)``: a hit's chunks, and behind them the tails that it may end in."""


def unpack_places(packed: bytes, spec: ModelSpec) -> Places | None:
    """The places of so many whole chunks of a model; None where there are none, or others than it has."""
    shape = (len(spec.groups), len(spec.shard.peers()), 2)
    if not packed or len(packed) % (8 * shape[0] * shape[1] * shape[2]):
        return None
    return np.frombuffer(packed, "<u8").reshape(-1, *shape)


def is_placed(spec: ModelSpec, places: Places, tokens: int, tail: int) -> bool:
    """Has everything a place that a load of a hit reads, in every group and shard?

    What a group does not need for this hit may have none.

    :param tokens: of the hit.
    :param tail: the row of the object that it ends in, where that is not the prompt's own full chunk; else -1.
    """
    there = places[..., 0] != NOWHERE
    for number, group in enumerate(spec.groups):
        need = group.rules.need(tokens, spec.chunk_tokens)
        chunks = there[need.start : need.stop - (tail >= 0), number]
        if not chunks.all() or (tail >= 0 and not there[tail, number].all()):
            return False
    return True

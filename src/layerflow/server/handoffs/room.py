"""The room of a hand-off in the arena: what is stored is pinned, and what is not has a place kept for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus


class Taken(NamedTuple):
    """Keys that are not stored; those of them that have room now; and those whose end nobody will tell of."""

    pending: set[bytes]
    promised: set[bytes]
    foreign: set[bytes]


def take(pool: Pool, owner: Owner, objects: Mapping[bytes, NewObject]) -> Taken | None:
    """Pin what is stored of these and reserve room for what nobody writes. None: there is no room, nothing is taken."""
    places = pool.acquire(list(objects), owner, math.inf)
    missing = [new for new, place in zip(objects.values(), places, strict=True) if place is None]
    room = pool.reserve(missing, owner)
    if any(place.outcome in (ReserveStatus.FULL, ReserveStatus.TOO_LARGE) for place in room):
        pool.revoke([new.key for new in missing], owner)
        pool.release(owner)
        return None
    pending = {new.key for new in missing}
    reserved = zip(missing, room, strict=True)
    promised = {new.key for new, place in reserved if place.outcome is ReserveStatus.RESERVED}
    return Taken(pending, promised, {key for key in pending - promised if not _is_told(pool, key)})


def _is_told(pool: Pool, key: bytes) -> bool:
    """Steps tell of the end of what they save, and another hand-off keeps room for it until one does."""
    writer = pool.writer(key)
    return isinstance(writer, tuple) and writer[0] in ("step", "handoff")

"""What a hand-off takes in a slice: all of it, or nothing, also where the pool refuses."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pool.pool_contract import OBJECT, WRITER, key_of, new

from layerflow.errors import PoolError
from layerflow.pool.arena import Arena
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.handoffs.handoff import take

OWNER = ("handoff", "h", 1)


def stored(count: int) -> tuple[MemoryPool, Mapping[bytes, NewObject]]:
    pool = MemoryPool(Arena(8 * OBJECT))
    objects = {key_of(number): new(number) for number in range(count)}
    pool.reserve(list(objects.values()), WRITER)
    pool.commit(list(objects), WRITER)
    return pool, objects


def test_what_is_taken_is_its_own() -> None:
    pool, objects = stored(2)
    assert take(pool, OWNER, objects) is not None
    assert list(pool.owners()) == [OWNER] and pool.pinned_by(OWNER) == 2


def test_a_reservation_that_fails_leaves_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, objects = stored(2)

    def fail(*_: object) -> None:
        raise PoolError("the arena's books do not add up")

    monkeypatch.setattr(pool, "reserve", fail)
    with pytest.raises(PoolError):
        take(pool, OWNER, objects)
    assert list(pool.owners()) == []
    pool.validate()

"""What others tell of the sizes that a model runs in costs the pool little, however often they tell it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from server.support import Memory

from layerflow.boxes import Box
from layerflow.keys import object_key
from layerflow.objects import object_bytes
from layerflow.pool import covering
from layerflow.pool.base import NewObject
from layerflow.pool.covering import MOST_BOXES, CoveringPool
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

HEADS, LAYERS = 8, 64


def shard(tp: int, pp: int) -> Shard:
    """The first of `tp` x `pp` workers."""
    return Shard(0, tp, 0, pp, (HEADS,), ((LAYERS // pp,) * pp,))


def spec_of(tp: int, pp: int) -> ModelSpec:
    first = shard(tp, pp)
    planes = (Plane("k", "uint8", (first.box(0).heads, 8)),)
    return ModelSpec("m", "c", (GroupSpec("full", 4, tuple(range(LAYERS // pp)), planes),), first, chunk_tokens=16)


@pytest.fixture
def pool() -> CoveringPool:
    return CoveringPool(Memory(1 << 20))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many boxes were compared."""
    compared = [0]
    overlap = Box.overlap

    def count(self: Box, other: Box) -> Box:
        compared[0] += 1
        return overlap(self, other)

    monkeypatch.setattr(Box, "overlap", count)
    return compared


def looked_for(pool: CoveringPool, spec: ModelSpec) -> set[Shard]:
    return set(pool._looked_for(pool._partitions[spec.fingerprint]))


def test_boxes_that_share_no_layer_are_not_compared(pool: CoveringPool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = spec_of(1, 32)
    pool.add_partition(own)
    compared = counted(monkeypatch)
    pool.add_remote_partition(own.fingerprint, shard(2, 32))
    assert shard(2, 32) in looked_for(pool, own)
    assert compared[0] <= 32 * 3 * 2, "96 boxes are 4,560 pairs"


def test_a_partition_of_more_workers_than_are_believed_is_not_looked_for(pool: CoveringPool) -> None:
    own = spec_of(1, 1)
    pool.add_partition(own)
    pool.add_remote_partition(own.fingerprint, shard(8, 64))
    assert MOST_BOXES < 8 * 64
    assert looked_for(pool, own) == {own.shard}
    pool.add_remote_partition(own.fingerprint, shard(8, 8))
    assert shard(8, 8) in looked_for(pool, own)


def test_what_is_told_again_costs_nothing(pool: CoveringPool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = spec_of(1, 1), [shard(2, 1), shard(4, 1)]
    pool.add_partition(own)
    for each in told:
        pool.add_remote_partition(own.fingerprint, each)
    monkeypatch.setattr(covering, "_overlapping_keys", lambda *_: pytest.fail("what is known is not worked out again"))
    for each in itertools.chain(*[told] * 3, [own.shard]):
        pool.add_remote_partition(own.fingerprint, each)


def store(pool: CoveringPool, keys: Sequence[bytes], spec: ModelSpec, blocks: int = 1) -> None:
    group = spec.groups[0]
    objects = [NewObject(key, object_bytes(group, blocks), blocks, blocks * group.block_size) for key in keys]
    assert all(room.offset >= 0 for room in pool.reserve(objects, "writer"))
    assert pool.commit(list(keys), "writer") == len(keys)


def test_pieces_of_which_one_is_missing_or_too_small_are_not_pinned() -> None:

    pool = CoveringPool(Memory(4 << 20))
    whole, halves = spec_of(1, 1), spec_of(2, 1)
    pool.add_partition(whole)
    pool.add_partition(halves)
    digest = bytes(range(16))
    key = object_key(digest, 0, whole.shard)
    pieces = [object_key(digest, 0, part) for part in halves.shard.peers()]
    store(pool, pieces[:1], halves)
    assert pool.acquire([key], "reader", 1e9) == [None]
    store(pool, pieces[1:], halves)
    assert pool.acquire([key], "reader", 1e9, counts=[2]) == [None], "one block is there, and two are wanted"
    assert pool.statistics().pinned == 0
    (place,) = pool.acquire([key], "reader", 1e9, counts=[1])
    assert place is not None and len(place.pieces) == 2
    assert pool.statistics().pinned == 2
    pool.release("reader")
    assert pool.statistics().pinned == 0
    pool.validate()

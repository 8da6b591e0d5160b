"""Objects of other partitions stand in for one that was never stored: looked up, pinned, hidden together."""

from __future__ import annotations

import pytest
from pool_contract import OBJECT, READER, WRITER, PoolContract

from layerflow.boxes import TO_THE_END, Box, cover
from layerflow.keys import object_key, several_key
from layerflow.places import NO_PLACE
from layerflow.pool.arena import Arena
from layerflow.pool.base import NewObject, Pool
from layerflow.pool.covering import MOST_PARTITIONS, CoveringPool
from layerflow.presence import PresenceWriter
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

DIGEST, TAIL = b"D" * 16, b"T" * 16
FOREVER = 1e18


def spec(tp: int = 1, rank: int = 0, heads: tuple[int, ...] = (16,), content: str = "c", layers: int = 2) -> ModelSpec:
    groups = (GroupSpec("full", 16, tuple(range(layers)), (Plane("kv", "uint8", (16 // tp, 2)),)),)
    return ModelSpec("m", content, groups, Shard(rank, tp, heads=heads, stages=((layers,),)))


def keys(tp: int, digest: bytes = DIGEST) -> list[bytes]:
    return [object_key(digest, 0, shard) for shard in spec(tp).shard.peers()]


def store(pool: CoveringPool, *names: bytes, parent: bytes = b"", tokens: int = 256) -> None:
    pool.reserve([NewObject(name, OBJECT, 16, tokens, parent) for name in names], WRITER)
    assert pool.commit(names, WRITER) == len(names)


class CoveringBench:
    """A pool whose model runs in two partitions."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(nbytes)
        self.pool = CoveringPool(self.arena)
        self.pool.add_partition(spec(1))
        self.pool.add_partition(spec(2))
        self.memory = Arena.attach(self.arena.fd, self.arena.nbytes).array


class TestCoveringPool(PoolContract):
    @pytest.fixture
    def bench(self):
        bench = CoveringBench(16 * OBJECT)
        yield bench
        bench.pool.validate()


@pytest.fixture
def pool() -> CoveringPool:
    pool = CoveringPool(Arena(64 * OBJECT))
    pool.add_partition(spec(2))
    pool.add_partition(spec(1))
    return pool


def test_is_a_pool() -> None:
    pool: Pool = CoveringPool(Arena(OBJECT))
    assert pool.statistics().capacity_bytes == OBJECT


def test_there_when_all_of_it_is(pool: CoveringPool) -> None:
    [whole], halves = keys(1), keys(2)
    store(pool, halves[0])
    assert pool.lookup([whole]) == [False] and pool.acquire([whole], READER, FOREVER) == [None]
    store(pool, halves[1])
    assert pool.lookup([whole]) == [True]
    [place] = pool.acquire([whole], READER, FOREVER)
    own = pool.acquire(halves, READER, FOREVER)
    assert place is not None and place[1:3] == (16, 256)
    assert place.pieces == tuple(
        (box, at.offset)
        for box, at in zip((Box(0, TO_THE_END, 0, 8), Box(0, TO_THE_END, 8, 16)), own, strict=True)
        if at is not None
    )
    assert [box.of_layers(2) for box, _ in place.pieces] == [Box(0, 2, 0, 8), Box(0, 2, 8, 16)]
    pool.validate()


def test_a_part_of_a_larger_one_is_there(pool: CoveringPool) -> None:
    [whole], halves = keys(1), keys(2)
    store(pool, whole)
    first, second = pool.acquire(halves, READER, FOREVER)
    assert first is not None and first.pieces == second.pieces == ((Box(0, TO_THE_END, 0, 16), first.offset),)


def test_the_own_object_goes_first(pool: CoveringPool) -> None:
    [whole] = keys(1)
    store(pool, *keys(2), whole)
    [place] = pool.acquire([whole], READER, FOREVER)
    assert place is not None and not place.pieces


def test_pieces_are_pinned(pool: CoveringPool) -> None:
    [whole], halves = keys(1), keys(2)
    store(pool, *halves)
    pool.acquire([whole], READER, FOREVER)
    for n in range(100, 180):
        store(pool, bytes([n]) * 24)
    assert pool.lookup(halves) == [True, True]
    pool.release(READER)
    for n in range(10, 90):  # these are read, too
        store(pool, bytes([n]) * 24)
        pool.acquire([bytes([n]) * 24], READER, FOREVER)
        pool.release(READER)
    assert pool.lookup([*halves, whole]) == [False, False, False]
    pool.validate()


def test_a_lease_pins_pieces_and_tells_no_place_of_them(pool: CoveringPool) -> None:
    [whole], halves = keys(1), keys(2)
    store(pool, *halves)
    assert pool.lease([whole], READER, FOREVER) == NO_PLACE
    assert pool.statistics().pinned == 2
    assert NO_PLACE not in pool.lease(halves, READER, FOREVER)


def test_hiding_it_hides_its_pieces(pool: CoveringPool) -> None:
    [whole], halves = keys(1), keys(2)
    store(pool, *halves)
    assert pool.hide([whole]) == 2
    assert pool.lookup([whole, *halves]) == [False] * 3


def test_tails_of_others_are_told_by_the_readers_keys(pool: CoveringPool) -> None:
    [parent], parents = keys(1), keys(2)
    for own, name in zip(parents, keys(2, TAIL), strict=True):
        store(pool, name, parent=own, tokens=7)
    assert list(pool.tails(parent)) == [(7, keys(1, TAIL)[0])]
    assert pool.lookup(keys(1, TAIL)) == [True]


def test_other_models_and_what_cannot_be_cut_stand_apart() -> None:
    pool = CoveringPool(Arena(64 * OBJECT))
    pool.add_partition(spec(1))
    pool.add_partition(spec(2, content="other"))
    pool.add_partition(spec(2, heads=(0,)))
    store(pool, *keys(2))
    assert pool.lookup(keys(1)) == [False]


@pytest.mark.parametrize("order", [(2, 8), (8, 2)])
def test_models_of_other_depths_have_keys_that_end_alike(order: tuple[int, int]) -> None:
    """What covers a key of one of them is told as that model's layers, whichever model is known for longer."""
    pool = CoveringPool(Arena(64 * OBJECT))
    for layers in order:
        for tp in (1, 2):
            pool.add_partition(spec(tp, content=f"{layers} layers", layers=layers))
    store(pool, *keys(2))
    [place] = pool.acquire(keys(1), READER, FOREVER)
    assert place is not None
    for layers in order:
        whole = spec(1, layers=layers)
        boxes = tuple(box.of_layers(whole.depth_of(0)) for box, _ in place.pieces)
        assert boxes == (Box(0, layers, 0, 8), Box(0, layers, 8, 16))
        assert not cover(whole.box(0), boxes).missing


def test_the_newest_partitions_are_looked_for() -> None:
    pool = CoveringPool(Arena(64 * OBJECT))
    sizes = (16, 1, 2, 4, 8)
    assert len(sizes) == MOST_PARTITIONS + 1
    for size in sizes:
        pool.add_partition(spec(size))
    store(pool, *keys(16))
    assert pool.lookup(keys(1)) == [False]
    store(pool, *keys(4))
    assert pool.lookup(keys(1)) == [True]


def test_the_table_says_when_it_does_not_tell() -> None:
    presence = PresenceWriter(1 << 16)
    pool = CoveringPool(Arena(64 * OBJECT), presence)
    pool.add_partition(spec(1))
    assert not presence.may_hold(several_key(spec(1).fingerprint))
    pool.add_partition(spec(2))
    assert presence.may_hold(several_key(spec(1).fingerprint))
    pool.validate()

from __future__ import annotations

import gc
import math
import random
import sys

import numpy as np
import pytest
from pool_contract import OBJECT, OTHER, READER, WRITER, PoolContract, key_of, new, outcomes

from layerflow.objects import HEADER_BYTES
from layerflow.places import NO_PLACE, PLACE
from layerflow.pool.arena import Arena
from layerflow.pool.base import Pool, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.presence import PresenceWriter


class MemoryBench:
    """A small pool, and its arena as another process would map it."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(nbytes)
        self.pool = MemoryPool(self.arena)
        self.second = Arena.attach(self.arena.fd, self.arena.nbytes)

    @property
    def memory(self) -> np.ndarray:
        return self.second.array


class TestMemoryPool(PoolContract):
    @pytest.fixture
    def bench(self):
        bench = MemoryBench(16 * OBJECT)
        yield bench
        bench.pool.validate()


def test_is_a_pool():
    pool: Pool = MemoryPool(Arena(OBJECT))
    assert pool.statistics().capacity_bytes == OBJECT


def test_warmth_is_reported():
    arena = Arena(64 << 10)
    pool = MemoryPool(arena)
    assert pool.statistics().warm_bytes == 0
    arena.populate()
    assert pool.statistics().warm_bytes == arena.nbytes


@pytest.mark.parametrize("how", ["lease", "acquire", "hold"])
def test_what_is_let_go_takes_nothing_of_the_share_of_leases(how, monkeypatch):
    monkeypatch.setattr("layerflow.pool.memory.PINS_AT_ONCE", 1)
    pool = MemoryPool(Arena(16 * OBJECT), lease_share=0.5)
    keys = [key_of(number) for number in range(16)]
    pool.reserve([new(number) for number in range(16)], WRITER)
    pool.commit(keys, WRITER)
    pool.hold(keys[:8], READER, math.inf, lease=True)
    pool.let_go(READER)
    more = {"lease": True} if how != "lease" else {}
    getattr(pool, how)(keys[6:12], OTHER, math.inf, **more)
    assert pool.pinned_by(OTHER) == 6
    pool.validate()
    assert pool.statistics().pinned == 8, "no more have ended than were wanted"
    pool.acquire(keys[:2], OTHER, math.inf)
    assert pool.statistics().pinned == 8, "what fits ends none"


def test_low_memory_goes_first_because_it_is_warm_first():
    pool = MemoryPool(Arena(1 << 20))
    offsets = [reserved.offset for reserved in pool.reserve([new(i) for i in range(64)], WRITER)]
    assert offsets == [i * OBJECT for i in range(64)]


def test_a_new_size_takes_the_cheapest_neighbourhood_when_the_old_ones_are_all_mixed():
    """Victims in order would leave holes everywhere; a neighbourhood without pins is emptied instead."""
    pool = MemoryPool(Arena(256 * OBJECT))
    pool.reserve([new(i) for i in range(256)], WRITER)
    pool.commit([key_of(i) for i in random.Random(0).sample(range(256), 256)], WRITER)
    pool.acquire([key_of(i) for i in range(256) if i // 8 % 2 or i < 8], READER, 9.0)
    [wide] = pool.reserve([new("wide", 8 * OBJECT)], WRITER)
    pool.validate()
    assert wide.outcome is ReserveStatus.RESERVED
    assert pool.statistics().evictions <= 24


def test_a_mixed_batch_that_needs_eviction_of_several_sizes_never_takes_its_own_room():
    pool = MemoryPool(Arena(64 * OBJECT))
    for turn in range(12):
        sizes = [OBJECT * (1 + (turn + i) % 5) for i in range(10)]
        batch = [new((turn, i), size) for i, size in enumerate(sizes)]
        reserved = pool.reserve(batch, WRITER)
        pool.validate()
        assert outcomes(reserved) == [ReserveStatus.RESERVED] * 10
        assert pool.commit([each.key for each in batch], WRITER) == 10


@pytest.mark.parametrize("seed", range(6))
def test_changing_mixes_of_sizes_under_random_pins(seed):
    """Rooms of one call are on no books yet while the next is made: emptying a neighbourhood must spare them."""
    rng = random.Random(seed)
    pool = MemoryPool(Arena(96 * OBJECT))
    for turn in range(120):
        if turn % 10 == 0:
            sizes = rng.sample(range(1, 12), 3)
        batch = [new((turn, i), rng.choice(sizes) * OBJECT - rng.choice((0, 0, 500))) for i in range(rng.randint(1, 9))]
        reserved = pool.reserve(batch, WRITER)
        pool.validate()
        written = [
            each for each, (outcome, _) in zip(batch, reserved, strict=True) if outcome is ReserveStatus.RESERVED
        ]
        assert pool.commit([each.key for each in rng.sample(written, len(written))], WRITER) == len(written)
        pool.acquire([each.key for each in written if rng.random() < 0.3], READER, turn + rng.randint(1, 12))
        pool.expire(turn)


class CountingOwner:
    """Counts how often it is looked up."""

    asked = 0

    def __hash__(self) -> int:
        CountingOwner.asked += 1
        return 7


def test_pins_that_end_at_the_same_time_cost_the_same_however_many_there_were():
    pool = MemoryPool(Arena(16 * OBJECT))
    pool.reserve([new(0)], WRITER)
    pool.commit([key_of(0)], WRITER)
    owner, asked = CountingOwner(), []
    for _ in range(2):
        before = CountingOwner.asked
        for _ in range(1500):
            pool.acquire([key_of(0)], owner, 1e6)
            pool.release(owner)
        asked.append(CountingOwner.asked - before)
    assert asked[1] <= 1.2 * asked[0] < 15 * 1500
    pool.acquire([key_of(0)], owner, 1e6)
    assert pool.expire(1e6) == 1
    pool.validate()


def test_released_pins_do_not_pile_up():
    pool = MemoryPool(Arena(16 * OBJECT))
    pool.reserve([new(i) for i in range(16)], WRITER)
    pool.commit([key_of(i) for i in range(16)], WRITER)
    for turn in range(2000):
        pool.acquire([key_of(i) for i in range(16)], (READER, turn), 1e6 + turn)
        pool.release((READER, turn))
    assert pool._directory._ends.entries < 400
    pool.acquire([key_of(0)], READER, 5.0)
    assert pool.expire(1e7) == 1
    pool.validate()


def test_an_object_whose_header_was_overwritten_is_hidden_instead_of_read():
    bench = MemoryBench(16 * OBJECT)
    pool = bench.pool
    places = pool.reserve([new(i) for i in range(3)], WRITER)
    pool.commit([key_of(i) for i in range(3)], WRITER)
    bench.memory[places[1].offset + 9] ^= 1
    found = pool.acquire([key_of(i) for i in range(3)], READER, 9.0)
    assert [place is not None for place in found] == [True, False, True]
    assert pool.lookup([key_of(1)]) == [False]
    assert pool.statistics().hidden == 1
    pool.validate()


def test_other_processes_see_what_is_there_without_asking():
    presence = PresenceWriter(16 * OBJECT)
    pool = MemoryPool(Arena(16 * OBJECT), presence)
    parent, tail = key_of("parent"), new("tail", parent=key_of("parent"))
    pool.reserve([new(0), tail], WRITER)
    assert not presence.may_hold(key_of(0)), "half-written"
    pool.commit([key_of(0), tail.key], WRITER)
    assert presence.may_hold(key_of(0)) and presence.may_hold_tails(parent)
    pool.hide([tail.key])
    assert presence.may_hold(key_of(0)) and not presence.may_hold_tails(parent)
    pool.reserve([new(number) for number in range(1, 17)], WRITER)
    assert pool.statistics().evictions == 1
    assert not presence.may_hold(key_of(0))
    pool.commit([key_of(number) for number in range(1, 17)], WRITER)
    pool.clear()
    assert not presence.memory.array.any()


def test_leases_leave_room_for_saves_however_many_requests_wait():
    pool = MemoryPool(Arena(16 * OBJECT), lease_share=0.5)
    pool.reserve([new(i) for i in range(16)], WRITER)
    pool.commit([key_of(i) for i in range(16)], WRITER)
    for request in range(1000):  # each waits with a hit on half of what another one waits with
        keys = [key_of((request + i) % 16) for i in range(2)]
        assert None not in pool.acquire(keys, ("waits", request), math.inf, lease=True)
    assert pool.statistics().pinned == 8
    pool.acquire([key_of(i) for i in range(16)], READER, math.inf)  # a step's loads are pinned all the same
    assert pool.statistics().pinned == 16
    pool.release(READER)
    saved = pool.reserve([new(100 + i) for i in range(16)], WRITER)
    assert [each.outcome for each in saved] == [ReserveStatus.RESERVED] * 8 + [ReserveStatus.FULL] * 8
    pool.hold([key_of(i) for i in range(16)], OTHER, math.inf, lease=True)
    pool.validate()
    for request in range(1000):
        pool.release(("waits", request))
    pool.release(OTHER)
    assert pool.statistics().pinned == 0
    pool.validate()


def test_looking_for_room_of_a_new_size_costs_no_more_the_more_pin() -> None:
    """An arena that is full, of objects of one size: every second one is pinned."""
    work = []
    for owners in (1, 10_000):
        pool = MemoryPool(Arena(16 * OBJECT))
        pool.reserve([new(i) for i in range(16)], WRITER)
        pool.commit([key_of(i) for i in range(16)], WRITER)
        for owner in range(owners):
            pool.hold([key_of(i) for i in range(0, 16, 2)], ("waits", owner), math.inf)
        events = []
        before = sys.getprofile()
        gc.disable()  # what listens to the collector, as hypothesis does, would count
        sys.setprofile(lambda _, event, __, events=events: events.append(event))
        try:
            wide = pool.reserve([new("wide", 3 * OBJECT)], OTHER)
        finally:
            sys.setprofile(before)
            gc.enable()
        assert outcomes(wide) == [ReserveStatus.FULL] and pool.statistics().evictions == 0
        work.append(len(events))
        pool.validate()
    assert work[1] == work[0]


def test_room_of_a_new_size_is_made_where_nothing_stays() -> None:
    pool = MemoryPool(Arena(16 * OBJECT))
    pool.reserve([new(i) for i in range(16)], WRITER)
    pool.commit([key_of(i) for i in range(15)], WRITER)
    for owner in range(3):
        pool.hold([key_of(i) for i in range(0, 15, 4)], owner, math.inf)
    assert outcomes(pool.reserve([new("wide", 4 * OBJECT)], OTHER)) == [ReserveStatus.FULL]
    pool.release(0)
    pool.release(1)
    assert outcomes(pool.reserve([new("wide", 4 * OBJECT)], OTHER)) == [ReserveStatus.FULL], "one still pins them"
    pool.release(2, [key_of(4)])
    assert outcomes(pool.reserve([new("wide", 4 * OBJECT)], OTHER)) == [ReserveStatus.RESERVED]
    assert pool.lookup([key_of(i) for i in (0, 8, 12)]) == [True] * 3
    pool.validate()


def places(packed: bytes) -> list[bytes]:
    return [packed[at : at + PLACE.size] for at in range(0, len(packed), PLACE.size)]


def test_a_lease_tells_where_things_lie_and_of_which_generation():
    pool = MemoryPool(Arena(16 * OBJECT))
    offsets = [each.offset for each in pool.reserve([new(i) for i in range(3)], WRITER)]
    pool.commit([key_of(0), key_of(1)], WRITER)
    told = places(pool.lease([key_of(1), key_of("absent"), key_of(0), key_of(2), key_of(1)], READER, 9.0))
    assert told[1] == told[3] == NO_PLACE, "not there, and not complete"
    assert [PLACE.unpack(told[at])[0] for at in (0, 2, 4)] == [offsets[1], offsets[0], offsets[1]]
    pool.hide([key_of(1)])
    pool.release(READER)
    pool.revoke([key_of(2)], WRITER)
    assert pool.reserve([new(1)], WRITER)[0].offset == offsets[1]
    pool.commit([key_of(1)], WRITER)
    [again] = places(pool.lease([key_of(1)], READER, 9.0))
    assert PLACE.unpack(again)[0] == offsets[1] and again != told[0], "another generation of the place"


def test_generations_of_one_server_are_not_those_of_the_next():
    """A store may have objects whose headers were stored with theirs."""
    told = []
    for _ in range(2):
        pool = MemoryPool(Arena(16 * OBJECT))
        pool.reserve([new(1)], WRITER)
        pool.commit([key_of(1)], WRITER)
        told.append(pool.lease([key_of(1)], READER, 9.0))
    assert PLACE.unpack(told[0])[0] == PLACE.unpack(told[1])[0] and told[0] != told[1]


def test_what_a_lease_may_not_pin_has_no_place():
    pool = MemoryPool(Arena(16 * OBJECT), lease_share=0.25)
    pool.reserve([new(i) for i in range(16)], WRITER)
    keys = [key_of(i) for i in range(16)]
    pool.commit(keys, WRITER)
    told = places(pool.lease(keys[:6], READER, 9.0))
    assert [place != NO_PLACE for place in told] == [True] * 4 + [False] * 2
    assert [place != NO_PLACE for place in places(pool.lease(keys[4:8], OTHER, 9.0))] == [False] * 4
    assert places(pool.lease(keys[:2], OTHER, 9.0)) == told[:2], "what is pinned already costs nothing"
    pool.validate()


def test_a_lease_hides_what_was_overwritten_too():
    bench = MemoryBench(64 * OBJECT)
    pool = bench.pool
    offsets = [each.offset for each in pool.reserve([new(i) for i in range(64)], WRITER)]
    pool.commit([key_of(i) for i in range(64)], WRITER)
    bench.memory[offsets[7] : offsets[7] + HEADER_BYTES] = 0xEE
    told = places(pool.lease([key_of(i) for i in range(64)], READER, 9.0))
    assert [place == NO_PLACE for place in told] == [number == 7 for number in range(64)]
    assert pool.statistics().hidden == 1
    pool.validate()

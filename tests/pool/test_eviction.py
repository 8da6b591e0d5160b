from __future__ import annotations

from collections import OrderedDict

import pytest
from pool_contract import OBJECT, READER, WRITER, key_of, new

from layerflow.pool.arena import Arena
from layerflow.pool.base import ReserveStatus
from layerflow.pool.eviction import MOST_MOVES, AdaptiveClock, Evictable
from layerflow.pool.memory import MemoryPool


def filled(count: int, room: int = 10) -> tuple[AdaptiveClock[Evictable], list[Evictable]]:
    policy: AdaptiveClock[Evictable] = AdaptiveClock()
    items = [Evictable(key_of(i), room) for i in range(count)]
    for item in items:
        policy.admit(item)
    return policy, items


def test_unused_objects_leave_in_the_order_they_came():
    policy, items = filled(5)
    assert [policy.victim() for _ in range(6)] == [*items, None]
    policy.validate()


def test_used_objects_survive_a_scan():
    policy, items = filled(20)
    policy.use(items[:3])
    gone = []
    for i in range(200):
        policy.admit(Evictable(key_of(("scan", i)), 10))
        gone.append(policy.victim())
    assert set(items[:3]).isdisjoint(gone)
    assert set(items[3:]) <= set(gone)
    policy.validate()


def test_parked_objects_are_never_victims_and_cost_no_search():
    policy, items = filled(1000)
    for item in items[:-1]:
        policy.park([item])
    assert len(policy) == 1
    assert policy.victim() is items[-1]
    assert policy.victim() is None
    policy.unpark([items[7]])
    assert policy.victim() is items[7]
    policy.validate()


def test_an_object_that_returns_soon_after_it_left_is_proven():
    policy, _ = filled(100)
    gone = policy.victim()
    back = Evictable(gone.key, 10)
    policy.admit(back)
    assert back.proven
    assert back not in [policy.victim() for _ in range(98)]


def test_a_victim_is_remembered_for_as_many_victims_as_there_are_objects():
    policy, _ = filled(200)
    gone = [policy.victim() for _ in range(100)]
    back = Evictable(gone[0].key, 10)
    policy.admit(back)
    for turn in range(300):
        policy.admit(Evictable(key_of(("scan", turn)), 10))
        policy.victim()
    again = [Evictable(item.key, 10) for item in gone]
    for item in again:
        policy.admit(item)
    assert back.proven and not any(item.proven for item in again), "as many victims later they are forgotten"
    policy.validate()


def test_sizes_are_counted():
    policy, items = filled(3)
    policy.admit(Evictable(key_of("wide"), 70))
    assert (policy.of_size(10), policy.of_size(70), policy.of_size(5)) == (3, 1, 0)
    policy.park([items[0]])
    policy.victim()
    assert (policy.of_size(10), policy.of_size(70)) == (1, 1)


def pool_hit_rate(slots: int, requests: list[int]) -> float:
    pool = MemoryPool(Arena(slots * OBJECT))
    for name in requests:
        if pool.acquire([key_of(name)], READER, 9.0)[0] is None:
            assert pool.reserve([new(name)], WRITER)[0].outcome is ReserveStatus.RESERVED
            pool.commit([key_of(name)], WRITER)
        pool.release(READER)
    pool.validate()
    now = pool.statistics()
    return now.hits / (now.hits + now.misses)


def lru_hit_rate(slots: int, requests: list[int]) -> float:
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for name in requests:
        hits += name in cached
        cached[name] = None
        cached.move_to_end(name)
        if len(cached) > slots:
            cached.popitem(last=False)
    return hits / len(requests)


def test_a_scan_beside_a_hot_set_hurts_less_than_under_lru():
    """32 slots, 20 hot objects read round-robin, two never-again objects between any two of them."""
    requests = []
    for turn in range(2000):
        requests += [turn % 20, 10_000 + 2 * turn, 10_001 + 2 * turn]
    ours, lru = pool_hit_rate(32, requests), lru_hit_rate(32, requests)
    assert lru < 0.01
    assert ours > 0.30  # of 1/3, which is every hot read


def test_without_a_scan_it_is_no_worse_than_lru():
    requests = [(turn * turn + 3 * turn) % 40 if turn % 3 else turn % 8 for turn in range(3000)]
    assert pool_hit_rate(24, requests) > lru_hit_rate(24, requests) - 0.02


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_victim_moves_few_objects_however_many_were_used(used, proven):
    policy: AdaptiveClock[Evictable] = AdaptiveClock()
    items = [Evictable(key_of(number), 10) for number in range(10_000)]
    for item in items:
        item.proven = proven
        policy.admit(item)
    if used:
        policy.use(items)
    gone = [policy.victim() for _ in range(50)]
    assert policy.moves <= 50 * (MOST_MOVES + 1) < len(items) / 10
    assert len(set(gone)) == 50
    assert proven or gone == items[:50], "all were used equally: the oldest go"
    policy.validate()


def test_what_was_passed_over_once_goes_unless_it_was_used_again():
    policy: AdaptiveClock[Evictable] = AdaptiveClock()
    items = [Evictable(key_of(number), 10) for number in range(4)]
    for item in items:
        item.proven = True
        policy.admit(item)
    policy.use(items[:2])
    assert policy.victim() is items[2]
    policy.use(items[:1])
    assert [policy.victim() for _ in range(3)] == [items[3], items[1], items[0]]
    policy.validate()


def returning(policy: AdaptiveClock[Evictable], kind: str, count: int) -> None:
    """So many objects leave, and come back at once: new ones, or proven ones."""
    for number in range(count):
        item = Evictable(key_of((kind, number)), 10)
        item.proven = kind == "proven"
        policy.admit(item)
        while policy.victim() is not item:
            pass
        policy.admit(Evictable(item.key, 10))


def test_new_objects_get_more_room_where_they_leave_too_early_and_less_where_proven_ones_do():
    policy, _ = filled(50)
    returning(policy, "new", 5)
    more = policy.share
    assert more > 0.5
    returning(policy, "proven", 20)
    assert policy.share < more
    policy.validate()


def test_every_victim_of_a_used_pool_leaves_once():
    policy, items = filled(3000)
    policy.use(items[::2])
    gone = [policy.victim() for _ in items]
    assert len(set(gone)) == len(items) and policy.victim() is None
    policy.validate()

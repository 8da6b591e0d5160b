"""Keys that last until a time: a bounded set of them, and a heap that tells whose time is over."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.expiring import ExpiringSet, ExpiryHeap

MOST = 3


def test_the_oldest_are_forgotten_first() -> None:
    keys: ExpiringSet[bytes] = ExpiringSet(MOST)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        keys.add(key)
    assert len(keys) == 3 and b"b" not in keys and b"a" in keys
    keys.discard(b"a")
    keys.discard(b"z")
    assert len(keys) == 2 and b"a" not in keys


def test_adding_tells_which_key_it_has_pushed_out() -> None:
    keys: ExpiringSet[str] = ExpiringSet(2)
    assert [keys.add(key) for key in "abacbb"] == [None, None, None, "b", "a", None]


def test_a_key_ends_at_its_time() -> None:
    keys: ExpiringSet[str] = ExpiringSet(MOST)
    keys.add("a", 5.0)
    assert keys.holds("a", 4.9) and keys.seconds_left("a", 2.0) == 3.0 and keys.among("ab", 4.9) == {"a"}
    assert not keys.holds("a", 5.0) and keys.seconds_left("a", 6.0) == 0.0 and not keys.among("ab", 5.0)
    assert not keys.holds("b", 0.0) and keys.seconds_left("b", 0.0) == 0.0


def test_a_key_without_a_time_stays() -> None:
    keys: ExpiringSet[str] = ExpiringSet(MOST)
    keys.add("a")
    keys.expire(1e18)
    assert keys.holds("a", 1e18) and keys.seconds_left("a", 0.0) == math.inf


def test_a_key_that_is_added_again_may_end_sooner() -> None:
    keys: ExpiringSet[str] = ExpiringSet(MOST)
    keys.add("a", 5.0)
    keys.add("a", 3.0)
    assert not keys.holds("a", 4.0)


@pytest.mark.parametrize("key", ["a", ("engine", "request")])
def test_discarding_tells_whether_the_key_was_there(key: object) -> None:
    keys: ExpiringSet[object] = ExpiringSet(MOST)
    keys.add(key)
    assert keys.discard(key) and not keys.discard(key)


def test_expiry_stops_at_the_first_key_whose_time_is_not_over() -> None:
    keys: ExpiringSet[str] = ExpiringSet(MOST)
    keys.add("a", 1.0)
    keys.add("b", 9.0)
    keys.add("c", 1.0)
    assert keys.expire(2.0, 0) == []
    assert keys.expire(2.0) == ["a"]
    assert "a" not in keys and "c" in keys and not keys.holds("c", 2.0)


KEYS = "abcdefgh"
EVENTS = st.lists(st.tuples(st.sampled_from(["add", "discard", "expire"]), st.sampled_from(KEYS), st.integers(0, 5)))


@given(EVENTS, st.integers(1, 5), st.integers(1, 20))
def test_keys_that_last_equally_long_are_those_added_last_within_that_time(
    events: list[tuple[str, str, int]], most: int, lasts: int
) -> None:
    """Beside a list of (key, until), newest last, that is cut at the front."""
    keys: ExpiringSet[str] = ExpiringSet(most)
    known: list[tuple[str, float]] = []
    now = 0.0
    for event, key, passed in events:
        now += passed
        if event == "expire":
            keys.expire(now)
            known = [(each, until) for each, until in known if until > now]
        else:
            there = any(each == key for each, _ in known)
            known = [(each, until) for each, until in known if each != key]
            if event == "discard":
                assert keys.discard(key) is there
            else:
                known.append((key, now + lasts))
                pushed_out = known.pop(0)[0] if len(known) > most else None
                assert keys.add(key, now + lasts) == pushed_out
        assert len(keys) == len(known) <= most
        assert [each in keys for each in KEYS] == [each in dict(known) for each in KEYS]
        left = {each: until - now for each, until in known if until > now}
        assert {each: keys.seconds_left(each, now) for each in KEYS if keys.holds(each, now)} == left
        assert keys.among(KEYS, now) == left.keys()


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 20)), max_size=20), st.integers(0, 20))
def test_expiry_forgets_no_key_whose_time_is_not_over(added: list[tuple[str, int]], now: int) -> None:
    keys: ExpiringSet[str] = ExpiringSet(len(KEYS))
    for key, until in added:
        keys.add(key, until)
    before = keys.among(KEYS, now)
    keys.expire(now)
    assert keys.among(KEYS, now) == before == {key for key, until in dict(added).items() if until > now}


def test_the_soonest_ends_first_and_each_once() -> None:
    heap: ExpiryHeap[str] = ExpiryHeap()
    for key, until in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", math.inf)):
        heap.set(key, until)
    assert list(heap.expire(2.0)) == ["b", "c"] and not list(heap.expire(2.0))
    assert list(heap) == ["a", "d"] and list(heap.expire(1e18)) == ["a"]
    assert "d" in heap and heap.until("d") == math.inf and heap.until("a") == -math.inf


def test_keys_that_end_at_one_time_need_not_compare() -> None:
    heap: ExpiryHeap[object] = ExpiryHeap()
    keys = [object(), object(), object()]
    for key in keys:
        heap.set(key, 1.0)
    assert list(heap.expire(1.0)) == keys


def test_whoever_is_told_of_an_end_may_change_others() -> None:
    heap: ExpiryHeap[str] = ExpiryHeap()
    for key in "abc":
        heap.set(key, 1.0)
    ended = []
    for key in heap.expire(1.0):
        ended.append(key)
        heap.discard("b")
        if ended == ["a"]:
            heap.set("a", 5.0)
            heap.set("d", 0.0)
    assert ended == ["a", "d", "c"] and list(heap) == ["a"]


@pytest.mark.parametrize("until", [lambda _: 1e6, lambda turn: 1e6 + turn], ids=["the same time", "later ones"])
def test_renewing_does_not_pile_up(until: Callable[[int], float]) -> None:
    heap: ExpiryHeap[str] = ExpiryHeap()
    for turn in range(5000):
        heap.set("a", until(turn))
        heap.set("b", until(turn))
        heap.discard("b")
    assert heap.entries < 300 and heap.complete()


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "never", "discard", "expire"]), st.sampled_from(KEYS), st.integers(0, 9))
    )
)
def test_the_heap_is_a_dict_of_ends(events: list[tuple[str, str, int]]) -> None:
    heap: ExpiryHeap[str] = ExpiryHeap()
    known: dict[str, float] = {}
    for event, key, at in events:
        if event == "expire":
            over = [each for each, until in known.items() if until <= at]
            ended = list(heap.expire(at))
            assert sorted(ended) == sorted(over) and [known[each] for each in ended] == sorted(known[e] for e in over)
            for each in over:
                del known[each]
        elif event == "discard":
            heap.discard(key)
            known.pop(key, None)
        else:
            known[key] = math.inf if event == "never" else float(at)
            heap.set(key, known[key])
        assert list(heap) == list(known) and len(heap) == len(known) and heap.complete()
        assert {each: heap.until(each) for each in heap} == known

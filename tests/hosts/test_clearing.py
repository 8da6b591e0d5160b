"""The ask thread told of a purge: its keys come in several messages, and are removed in one call."""

import time

from hosts.bench import MakeBench, Thing, key_of
from layerflow.hosts.lanes import LookupLane
from layerflow.wire.host_messages import Clear, Cleared

THREE = Thing(1, 3, 1, 64)


def test_what_several_messages_name_is_removed_with_the_last(bench: MakeBench) -> None:
    one = bench()
    one.store(THREE)
    lane = one.lane = LookupLane(one.backend, one.told.put, one.backend_calls)
    now, soon_ms = time.monotonic(), 60_000
    messages = (
        (Clear(7, key_of(1), soon_ms, last=False), now),
        (Clear(8, key_of(3), 1, last=False), now - 60.0),
        (Clear(7, key_of(2), soon_ms), now),
    )
    for message in messages:
        lane.put(message)
    lane.start()
    first, other, last = (one.hear() for _ in messages)
    assert (first, other) == (Cleared(7, 0), Cleared(8, 0))
    assert last.id == 7 and "the 2 objects" in last.reason
    assert set(one.backend._objects) == {key_of(3)}
    assert one.calls(1) == ["hide 2"], "in one call"
    assert not lane._named, "nor is kept what a server named that did not go on"


def test_the_last_keys_of_a_purge_whose_first_ones_were_dropped_are_not_all_of_it(bench: MakeBench) -> None:
    one = bench()
    one.store(THREE)
    lane = one.lane = LookupLane(one.backend, one.told.put, one.backend_calls)
    now = time.monotonic()
    messages = (
        (Clear(7, key_of(1), 1, last=False), now - 60.0),
        (Clear(8, key_of(3), 60_000), now),
        (Clear(7, key_of(2), 60_000, last=False), now),
        (Clear(7, key_of(2), 60_000), now),
    )
    for message in messages:
        lane.put(message)
    lane.start()
    first, other, *later = (one.hear() for _ in messages)
    assert first == Cleared(7, 0) and "the 1 objects" in other.reason
    assert all(told.id == 7 and "its time was over" in told.reason for told in later)
    assert set(one.backend._objects) == {key_of(1), key_of(2)} and not lane._named

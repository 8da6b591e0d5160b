"""The fetch thread: each call of the server is one call of the backend, in order; what fails leaves its job."""

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from hosts.bench import Bench, MakeBench, Thing
from layerflow.hosts.backend import ObjectStatus
from layerflow.hosts.lanes import OVERRUN_CALLS, SLOWEST_BYTES_PER_S, CallTimeout, FetchLane
from layerflow.wire.host_messages import EndFetch, Fetch, Fetched, Pull
from layerflow.wire.packing import pack_u64


def start(bench: Bench, *messages: Any) -> list[bytes]:
    """A lane that is given these before it starts; the list of what it hides."""
    hidden: list[bytes] = []

    def hide(keys: Sequence[bytes]) -> None:
        hidden.extend(keys)

    bench.lane = FetchLane(bench.backend, bench.arena, bench.told.put, backend_calls=bench.backend_calls, hide=hide)
    for message in messages:
        bench.lane.put(message)
    bench.lane.start()
    return hidden


def outcomes(message: Fetched) -> list[tuple[int, ObjectStatus]]:
    return [(failure.position, ObjectStatus(failure.outcome)) for failure in message.failed]


def test_each_call_is_one_call_of_the_backend_and_all_objects_are_opened_with_the_first(bench: MakeBench) -> None:
    it, thing = bench(8 << 20), Thing(1, 4, 6, 4096)
    it.store(thing)
    start(
        it,
        Fetch(5, thing.said()),
        *(Pull(5, 1, 0, 2, 0, 1), Pull(5, 2, 2, 4, 0, 1), Pull(5, 3, 0, 4, 1, 6)),
        EndFetch(5),
    )
    assert [it.hear() for _ in range(3)] == [Fetched(5, 1), Fetched(5, 2), Fetched(5, 3)]
    assert thing.intact(it.arena) == [True] * 4
    assert it.calls(5) == ["open_fetch 4", "fetch 2 0:1", "fetch 2 0:1", "fetch 4 1:6", "close_fetch 4"]


def test_what_is_missing_leaves_the_job(bench: MakeBench) -> None:
    it = bench()
    it.store(Thing(2, 2, 3, 4096))
    thing = Thing(1, 3, 3, 4096)
    start(it, Fetch(1, thing.said()), Pull(1, 1, 0, 3, 0, 1), Pull(1, 2, 0, 3, 1, 3), EndFetch(1))
    first, last = it.hear(), it.hear()
    assert outcomes(first) == [(0, ObjectStatus.MISSING)]
    assert last == Fetched(1, 2)
    assert thing.intact(it.arena) == [False, True, True]
    assert it.calls(4)[-1] == "close_fetch 2"


def test_a_wrong_header_is_broken_and_hidden(bench: MakeBench) -> None:
    thing = Thing(1, 2, 3, 4096)
    it = bench(spoilt=[thing.keys[1].hex()])
    it.store(thing)
    hidden = start(it, Fetch(1, thing.said()), Pull(1, 1, 0, 2, 0, 1), Pull(1, 2, 0, 2, 1, 3))
    assert outcomes(it.hear()) == [(1, ObjectStatus.BROKEN)]
    assert it.hear() == Fetched(1, 2)
    assert hidden == [thing.keys[1]]
    assert thing.intact(it.arena)[0]


def test_a_call_has_the_time_that_its_bytes_need_and_hangs_past_it(bench: MakeBench) -> None:
    it, thing = bench(32 << 20, gated=("fetch",)), Thing(1, 2, 4, 1 << 20)
    it.store(thing)
    began = time.monotonic()
    start(it, Fetch(1, thing.said()), Pull(1, 1, 0, 2, 0, 4))
    it.calls(2)
    lane = it.lane
    assert lane is not None
    longest = CallTimeout().call_s * (1 + OVERRUN_CALLS) + (8 << 20) / SLOWEST_BYTES_PER_S
    assert began + longest <= lane.hung_at <= time.monotonic() + longest
    it.backend.gates["fetch"].release()
    assert it.hear() == Fetched(1, 1)
    assert lane.stop(20) and lane.hung_at == math.inf, "a lane that waits for work does not hang"


@pytest.mark.parametrize("method", ["open_fetch", "fetch"])
def test_an_exception_costs_its_objects_only(bench: MakeBench, method: str) -> None:
    it, thing = bench(raises={method: "the library is upset"}), Thing(1, 2, 3, 4096)
    it.store(thing)
    start(it, Fetch(1, thing.said()), Pull(1, 1, 0, 2, 0, 1))
    ended = it.hear()
    assert outcomes(ended) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]
    assert ended.failed[0].reason == f"{method}: RuntimeError: the library is upset"
    it.backend._options["raises"].clear()
    for message in (Fetch(2, thing.said()), Pull(2, 2, 0, 2, 0, 3)):
        it.lane.put(message)
    assert it.hear() == Fetched(2, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"offsets": pack_u64([0, 1 << 30])}, "arena"), ({"offsets": pack_u64([0])}, "offsets"), ({"tokens": b"abc"}, "")],
)
def test_a_job_that_cannot_be_is_refused_whole(bench: MakeBench, changes: dict[str, Any], reason: str) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    it.store(thing)
    start(it, Fetch(1, thing.said(**changes)), Pull(1, 1, 0, 2, 0, 3), EndFetch(1))
    ended = it.hear()
    assert outcomes(ended) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]
    assert reason in ended.failed[0].reason
    for message in (Fetch(2, thing.said()), Pull(2, 2, 0, 2, 0, 3)):
        it.lane.put(message)
    assert it.hear() == Fetched(2, 2)


def test_a_call_of_a_fetch_that_it_does_not_know_fails(bench: MakeBench) -> None:
    it = bench()
    start(it, Pull(9, 1, 0, 2, 0, 3), EndFetch(9))
    assert outcomes(it.hear()) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]


def test_a_host_that_stops_closes_what_is_open_and_fails_what_waits(bench: MakeBench) -> None:
    it, thing = bench(8 << 20, gated=("fetch",)), Thing(1, 1, 4, 4096)
    it.store(thing)
    start(it, Fetch(1, thing.said()), Pull(1, 1, 0, 1, 0, 1), Pull(1, 2, 0, 1, 1, 2))
    it.calls(2)
    assert not it.lane.stop(0)
    it.backend.gates["fetch"].release(9)
    assert it.hear() == Fetched(1, 1)
    ended = it.hear()
    assert "stops" in ended.failed[0].reason
    assert it.call() == "close_fetch 1"

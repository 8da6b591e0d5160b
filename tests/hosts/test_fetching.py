"""The fetch thread: slices of layers, in turn; what fails leaves its job."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from hosts.bench import Bench, MakeBench, Thing
from layerflow.hosts import fetch as fetching
from layerflow.hosts.backend import ObjectStatus
from layerflow.hosts.fetch import FIRST_SLICE_BYTES, LAST_SLICE_BYTES, FetchLane
from layerflow.wire.host_messages import Fetch, Fetched, Unfetch, pack_u64


def start(bench: Bench, *messages: Any, ago_s: float = 0.0) -> list[bytes]:
    """A lane that is given these before it starts; the list of what it hides."""
    hidden: list[bytes] = []

    def hide(keys: Sequence[bytes]) -> None:
        hidden.extend(keys)

    bench.lane = FetchLane(bench.backend, bench.arena, bench.told.put, bench.backend_calls, hide)
    for message in messages:
        bench.lane.put((message, time.monotonic() - ago_s))
    bench.lane.start()
    return hidden


def outcomes(message: Fetched) -> list[tuple[int, ObjectStatus]]:
    return [(failure.position, ObjectStatus(failure.outcome)) for failure in message.failed]


@pytest.mark.parametrize(
    ("call_s", "ends"),
    [(math.inf, [1, 5, 13, 29, 61, 70]), (0.0, [1, *range(5, 70, 4), 70])],
    ids=["quick calls", "slow calls"],
)
def test_the_first_slice_is_one_layer_and_the_others_grow_while_calls_are_quick(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, call_s: float, ends: list[int]
) -> None:
    monkeypatch.setattr(fetching, "CALL_S", call_s)
    it, thing = bench(32 << 20), Thing(1, 2, 70, FIRST_SLICE_BYTES // 8)
    assert LAST_SLICE_BYTES == 8 * FIRST_SLICE_BYTES
    it.store(thing)
    start(it, Fetch(5, thing.said(), 10_000))
    assert [it.hear() for _ in ends] == [Fetched(5, layers, layers == 70) for layers in ends]
    assert thing.intact(it.arena) == [True, True]
    slices = [f"fetch 2 {lo}:{hi}" for lo, hi in pairwise([0, *ends])]
    assert it.calls(len(slices) + 2) == ["open_fetch 2", *slices, "close_fetch 2"]


def test_jobs_take_turns_and_a_new_one_comes_first(bench: MakeBench) -> None:
    it = bench(16 << 20)
    things = [Thing(number, 1, 3, FIRST_SLICE_BYTES, at=number * (4 << 20)) for number in range(3)]
    for thing in things:
        it.store(thing)
    start(it, *(Fetch(number, thing.said(), 10_000) for number, thing in enumerate(things)))
    heard = [it.hear() for _ in range(9)]
    assert [(message.id, message.layers) for message in heard] == [
        *((0, 1), (1, 1), (2, 1)),
        *((0, 2), (1, 2), (2, 2)),
        *((0, 3), (1, 3), (2, 3)),
    ]
    assert [message.ended for message in heard] == [False] * 6 + [True] * 3


def test_what_is_missing_leaves_the_job(bench: MakeBench) -> None:
    it = bench()
    it.store(Thing(2, 2, 3, 4096))
    thing = Thing(1, 3, 3, 4096)
    start(it, Fetch(1, thing.said(), 10_000))
    first, last = it.hear(), it.hear()
    assert outcomes(first) == [(0, ObjectStatus.MISSING)]
    assert last == Fetched(1, 3, True)
    assert thing.intact(it.arena) == [False, True, True]
    assert it.calls(4)[-1] == "close_fetch 2"


def test_a_wrong_header_is_broken_and_hidden(bench: MakeBench) -> None:
    thing = Thing(1, 2, 3, 4096)
    it = bench(spoilt=[thing.keys[1].hex()])
    it.store(thing)
    hidden = start(it, Fetch(1, thing.said(), 10_000))
    assert outcomes(it.hear()) == [(1, ObjectStatus.BROKEN)]
    assert it.hear() == Fetched(1, 3, True)
    assert hidden == [thing.keys[1]]
    assert thing.intact(it.arena)[0]


def test_nothing_is_opened_once_the_time_has_run_out(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    start(it, Fetch(1, thing.said(), 1000), ago_s=2.0)
    ended = it.hear()
    assert ended.ended and outcomes(ended) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]
    assert "time" in ended.failed[0].reason
    assert it.backend.calls.empty()


def test_an_unwanted_fetch_stops_at_the_next_slice(bench: MakeBench) -> None:
    it, thing = bench(8 << 20, gated=("fetch",)), Thing(1, 1, 4, FIRST_SLICE_BYTES)
    it.store(thing)
    start(it, Fetch(1, thing.said(), 10_000))
    assert it.calls(2) == ["open_fetch 1", "fetch 1 0:1"]
    it.lane.put((Unfetch(1), 0.0))
    it.lane.put((Unfetch(7), 0.0))
    it.backend.gates["fetch"].release(9)
    assert it.hear() == Fetched(1, 1, False)
    ended = it.hear()
    assert (ended.layers, ended.ended, outcomes(ended)) == (1, True, [(0, ObjectStatus.FAILED)])
    assert it.call() == "close_fetch 1"


@pytest.mark.parametrize("method", ["open_fetch", "fetch"])
def test_an_exception_costs_its_objects_only(bench: MakeBench, method: str) -> None:
    it, thing = bench(raises={method: "the library is upset"}), Thing(1, 2, 3, 4096)
    it.store(thing)
    start(it, Fetch(1, thing.said(), 10_000))
    ended = it.hear()
    assert ended.ended and outcomes(ended) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]
    assert ended.failed[0].reason == f"{method}: RuntimeError: the library is upset"
    it.backend._options["raises"].clear()
    it.lane.put((Fetch(2, thing.said(), 10_000), time.monotonic()))
    assert (it.hear(), it.hear()) == (Fetched(2, 1, False), Fetched(2, 3, True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"offsets": pack_u64([0, 1 << 30])}, "arena"), ({"offsets": pack_u64([0])}, "offsets"), ({"tokens": b"abc"}, "")],
)
def test_a_job_that_cannot_be_is_refused_whole(bench: MakeBench, changes: dict[str, Any], reason: str) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    it.store(thing)
    start(it, Fetch(1, thing.said(**changes), 10_000), Fetch(2, thing.said(), 10_000))
    ended = it.hear()
    assert ended.ended and outcomes(ended) == [(0, ObjectStatus.FAILED), (1, ObjectStatus.FAILED)]
    assert reason in ended.failed[0].reason
    assert (it.hear(), it.hear()) == (Fetched(2, 1, False), Fetched(2, 3, True))


def test_a_host_that_stops_closes_what_is_open(bench: MakeBench) -> None:
    it, thing = bench(8 << 20, gated=("fetch",)), Thing(1, 1, 4, FIRST_SLICE_BYTES)
    it.store(thing)
    start(it, Fetch(1, thing.said(), 10_000))
    it.calls(2)
    assert not it.lane.stop(0)
    it.backend.gates["fetch"].release(9)
    assert it.hear() == Fetched(1, 1, False)
    ended = it.hear()
    assert ended.ended and "stops" in ended.failed[0].reason
    assert it.call() == "close_fetch 1"

"""The write thread: what has landed is written in one call, and published last."""

import time
from typing import Any

import pytest

from hosts.bench import Bench, MakeBench, Thing
from layerflow.hosts.backend import ObjectStatus
from layerflow.hosts.write import WriteLane
from layerflow.wire.host_messages import Advance, Drop, Finish, Write, Written, pack_u32


def start(bench: Bench, *messages: Any) -> WriteLane:
    """A lane that is given these before it starts."""
    lane = WriteLane(
        bench.backend, bench.arena, bench.told.put, bench.backend_calls, lambda places, report: bench.told.put(report)
    )
    bench.lane = lane
    put(lane, *messages)
    lane.start()
    return lane


def put(lane: WriteLane, *messages: Any) -> None:
    for message in messages:
        lane.put((message, time.monotonic()))


def outcomes(message: Written) -> dict[int, ObjectStatus]:
    return {failure.position: ObjectStatus(failure.outcome) for failure in message.failed}


def stored(bench: Bench, thing: Thing) -> list[bool]:
    """Which of them the pool has, with the bytes that the arena has."""
    whole = [
        bytes(bench.arena.view[offset : offset + thing.nbytes]) == bench.backend._objects.get(key)
        for key, offset in zip(thing.keys, thing.offsets, strict=True)
    ]
    assert not bench.backend._writing
    return whole


def test_what_landed_meanwhile_is_one_call(bench: MakeBench) -> None:
    it, thing = bench(gated=("write",)), Thing(1, 2, 6, 4096)
    thing.fill(it.arena)
    lane = start(it, Write(3, thing.said(), 1, 10_000))
    assert it.calls(2) == ["open_write 2", "write 2 0:1"]
    put(lane, Advance(3, 2), Advance(3, 4), Advance(3, 3))
    it.backend.gates["write"].release()
    assert it.call() == "write 2 1:4"
    put(lane, Finish(3))
    it.backend.gates["write"].release(2)
    assert it.calls(2) == ["write 2 4:6", "commit 2"]
    assert it.hear() == Written(3)
    assert stored(it, thing) == [True, True]


def test_a_call_keeps_the_caps_and_jobs_take_turns(bench: MakeBench) -> None:
    it = bench(1 << 20)
    first, second = (Thing(number, 3, 2, 4096, at=number * (1 << 17)) for number in (1, 5))
    first.fill(it.arena)
    start(it, Write(1, first.said(), 2, 10_000, 4, 4096 * 3), Write(2, second.said(), 2, 10_000, 99, 4096 * 3))
    assert it.calls(2) == ["open_write 3", "write 2 0:1"], "4 blocks: two objects of 2"
    assert it.calls(2) == ["open_write 3", "write 3 0:1"], "3 objects' bytes"
    assert it.calls(3) == ["write 1 0:1", "write 3 1:2", "write 2 1:2"]
    assert it.call() == "write 1 1:2"
    put(it.lane, Finish(1), Drop(2, pack_u32([0, 1, 2])))
    assert {it.hear().id, it.hear().id} == {1, 2}
    assert stored(it, first) == [True] * 3


def test_a_layer_of_an_object_larger_than_the_cap_is_still_written(bench: MakeBench) -> None:
    it, thing = bench(1 << 20), Thing(1, 1, 2, 8192)
    thing.fill(it.arena)
    start(it, Write(1, thing.said(), 2, 10_000, 1, 100), Finish(1))
    assert it.hear() == Written(1)
    assert it.calls(4) == ["open_write 1", "write 1 0:1", "write 1 1:2", "commit 1"]
    assert stored(it, thing) == [True]


def test_a_job_without_progress_holds_nothing_up(bench: MakeBench) -> None:
    it, still, quick = bench(), Thing(1, 1, 3, 4096), Thing(9, 1, 3, 4096, at=1 << 16)
    start(it, Write(1, still.said(), 0, 60_000), Write(2, quick.said(), 1, 60_000), Finish(2))
    assert it.hear() == Written(2)
    assert it.calls(4) == ["open_write 1", "open_write 1", "write 1 0:3", "commit 1"]


def test_room_is_asked_for_before_the_first_layer_and_given_back_without_any(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    lane = start(it, Write(1, thing.said(), 0, 10_000))
    assert it.calls(1) == ["open_write 2"]
    put(lane, Drop(1, pack_u32([0, 1])))
    assert outcomes(it.hear()) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.calls(1) == ["revoke 2"]
    assert stored(it, thing) == [False, False]


def test_what_is_dropped_at_once_is_never_opened(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    start(it, Write(1, thing.said(), 0, 10_000), Drop(1, pack_u32([0, 1])), Advance(1, 2), Finish(1))
    assert outcomes(it.hear()) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.backend.calls.empty()


def test_some_are_dropped_and_the_others_published(bench: MakeBench) -> None:
    it, thing = bench(gated=("write",)), Thing(1, 3, 3, 4096)
    thing.fill(it.arena)
    lane = start(it, Write(1, thing.said(), 1, 10_000))
    assert it.calls(2) == ["open_write 3", "write 3 0:1"]
    put(lane, Drop(1, pack_u32([1])), Finish(1))
    it.backend.gates["write"].release(9)
    assert outcomes(it.hear()) == {1: ObjectStatus.FAILED}
    assert it.calls(3) == ["revoke 1", "write 2 1:3", "commit 2"]
    assert stored(it, thing) == [True, False, True]


def test_existing_and_refused_objects_leave_the_job(bench: MakeBench) -> None:
    thing = Thing(1, 3, 3, 4096)
    it = bench(existing=[thing.keys[0].hex()], full=[thing.keys[2].hex()])
    thing.fill(it.arena)
    lane = start(it, Write(1, thing.said(), 3, 10_000), Finish(1))
    assert outcomes(it.hear()) == {0: ObjectStatus.EXISTS, 2: ObjectStatus.FULL}
    assert it.calls(3) == ["open_write 3", "write 1 0:3", "commit 1"]
    assert stored(it, thing) == [False, True, False]
    put(lane, Advance(1, 2), Finish(1), Drop(1, pack_u32([0])), Write(2, thing.said(), 0, 10_000))
    put(lane, Drop(2, pack_u32([0, 1, 2])))
    assert it.hear().id == 2


def test_a_job_whose_time_runs_out_is_revoked(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    start(it, Write(1, thing.said(), 1, 50))
    assert outcomes(it.hear()) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.calls(3) == ["open_write 2", "write 2 0:1", "revoke 2"]
    assert stored(it, thing) == [False, False]


@pytest.mark.parametrize(("method", "after"), [("open_write", []), ("write", ["revoke 2"]), ("commit", [])])
def test_an_exception_costs_its_objects_only(bench: MakeBench, method: str, after: list[str]) -> None:
    it, thing = bench(raises={method: "no"}), Thing(1, 2, 3, 4096)
    lane = start(it, Write(1, thing.said(), 3, 10_000), Finish(1))
    failed = it.hear()
    assert outcomes(failed) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert failed.failed[1].reason == f"{method}: RuntimeError: no"
    while it.call().split()[0] != method:
        pass
    it.backend._options["raises"].clear()
    other = Thing(7, 1, 3, 4096)
    put(lane, Write(2, other.said(), 3, 10_000), Finish(2))
    assert it.hear() == Written(2)
    assert [it.call() for _ in after] == after


def test_a_host_that_stops_revokes_what_is_open(bench: MakeBench) -> None:
    it, thing = bench(gated=("write",)), Thing(1, 2, 3, 4096)
    lane = start(it, Write(1, thing.said(), 1, 10_000))
    it.calls(2)
    assert not lane.stop(0)
    it.backend.gates["write"].release()
    assert outcomes(it.hear()) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.call() == "revoke 2"
    assert stored(it, thing) == [False, False]

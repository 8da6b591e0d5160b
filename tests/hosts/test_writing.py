"""The write thread: calls as they come, in order, each reported; what fails or is dropped is given back."""

from typing import Any

import pytest
from e2e.known import eventually

from hosts.bench import Bench, MakeBench, Thing
from layerflow.hosts.backend import ObjectStatus, Unreachable
from layerflow.hosts.lanes import WriteLane
from layerflow.wire.host_messages import Drop, EndWrite, Push, Write, Written
from layerflow.wire.packing import pack_u32


def start(bench: Bench, *messages: Any) -> WriteLane:
    """A lane that is given these before it starts."""
    lane = WriteLane(bench.backend, bench.arena, bench.backend_calls, bench.told.put)
    bench.lane = lane
    put(lane, *messages)
    lane.start()
    return lane


def put(lane: WriteLane, *messages: Any) -> None:
    for message in messages:
        lane.put(message)


def hear(bench: Bench) -> Written:
    """The next report."""
    report = bench.hear()
    assert isinstance(report, Written)
    return report


def outcomes(message: Written) -> dict[int, ObjectStatus]:
    return {failure.position: ObjectStatus(failure.outcome) for failure in message.failed}


def stored(bench: Bench, thing: Thing) -> list[bool]:
    """Which of them the pool has, with the bytes that the arena has."""
    whole = [
        bytes(bench.arena.view[offset : offset + thing.nbytes]) == bench.backend._objects.get(key)
        for key, offset in zip(thing.keys, thing.offsets, strict=True)
    ]
    assert eventually(lambda: not bench.backend._writing), "a call is told as it begins"
    return whole


def test_each_call_is_one_of_the_backend_and_reported(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 6, 4096)
    thing.fill(it.arena)
    start(
        it, Write(3, thing.said()), Push(3, 1, 0, 2, 0, 1), Push(3, 4, 0, 2, 1, 6), thing.publishing(3, 5), EndWrite(3)
    )
    assert [hear(it), hear(it), hear(it)] == [Written(3, 1), Written(3, 4), Written(3, 5)]
    assert it.calls(4) == ["open_write 2", "write 2 0:1", "write 2 1:6", "commit 2"]
    assert stored(it, thing) == [True, True] and it.backend.calls.empty()


def test_a_call_may_carry_some_of_the_objects(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 3, 2, 4096)
    thing.fill(it.arena)
    calls = [
        Push(1, call, *objects, layer, layer + 1)
        for call, (layer, objects) in enumerate(
            [(layer, objects) for layer in range(2) for objects in ((0, 2), (2, 3))], 1
        )
    ]
    start(it, Write(1, thing.said()), *calls, thing.publishing(1, 9))
    assert it.calls(6) == ["open_write 3", "write 2 0:1", "write 1 0:1", "write 2 1:2", "write 1 1:2", "commit 3"]
    assert [hear(it).call for _ in range(4)] == [1, 2, 3, 4] and hear(it).call == 9
    assert stored(it, thing) == [True] * 3


def test_room_is_asked_for_before_the_first_layer_and_given_back_without_any(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    lane = start(it, Write(1, thing.said()))
    assert it.calls(1) == ["open_write 2"]
    put(lane, EndWrite(1))
    assert it.calls(1) == ["revoke 2"]
    assert stored(it, thing) == [False, False]


def test_some_are_dropped_and_the_others_published(bench: MakeBench) -> None:
    it, thing = bench(gated=("write",)), Thing(1, 3, 3, 4096)
    thing.fill(it.arena)
    lane = start(it, Write(1, thing.said()), Push(1, 1, 0, 3, 0, 1))
    assert it.calls(2) == ["open_write 3", "write 3 0:1"]
    put(lane, Drop(1, pack_u32([1, 1, 7])), Push(1, 2, 0, 3, 1, 3), thing.publishing(1, 3), EndWrite(1))
    it.backend.gates["write"].release(9)
    assert [hear(it), hear(it), hear(it)] == [Written(1, 1), Written(1, 2), Written(1, 3)]
    assert it.calls(3) == ["revoke 1", "write 2 1:3", "commit 2"]
    assert stored(it, thing) == [True, False, True] and it.backend.calls.empty()


def test_existing_and_refused_objects_leave_the_job_and_are_told_with_its_first_call(bench: MakeBench) -> None:
    thing = Thing(1, 3, 3, 4096)
    it = bench(existing=[thing.keys[0].hex()], full=[thing.keys[2].hex()])
    thing.fill(it.arena)
    start(it, *thing.writing(1))
    assert outcomes(hear(it)) == {0: ObjectStatus.EXISTS, 2: ObjectStatus.FULL}
    assert hear(it) == Written(1, 2)
    assert it.calls(3) == ["open_write 3", "write 1 0:3", "commit 1"]
    assert stored(it, thing) == [False, True, False]


def test_what_ends_unpublished_is_revoked(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    write, layers, _, end = thing.writing(1)
    start(it, write, layers, end)
    assert hear(it) == Written(1, 1)
    assert it.calls(3) == ["open_write 2", "write 2 0:3", "revoke 2"]
    assert stored(it, thing) == [False, False]


def test_calls_of_an_unknown_or_impossible_job_are_refused(bench: MakeBench) -> None:
    it, thing = bench(), Thing(1, 2, 3, 4096)
    outside = thing.said(offsets=b"\xff" * 16)
    start(it, Push(5, 1, 0, 2, 0, 3), Write(6, outside), Push(6, 2, 0, 2, 0, 3), Drop(8, pack_u32([0])), EndWrite(9))
    assert "does not know" in hear(it).failed[1].reason
    assert "of an arena of" in hear(it).failed[0].reason
    assert it.backend.calls.empty()


@pytest.mark.parametrize("method", ["open_write", "write", "commit"])
def test_an_exception_costs_its_objects_only(bench: MakeBench, method: str) -> None:
    it, thing = bench(raises={method: "no"}), Thing(1, 2, 3, 4096)
    lane = start(it, *thing.writing(1))
    told = [hear(it), hear(it)]
    [failed] = [report for report in told if report.failed]
    assert outcomes(failed) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert failed.failed[1].reason == f"{method}: RuntimeError: no"
    while it.call().split()[0] != method:
        pass
    it.backend._options["raises"].clear()
    other = Thing(7, 1, 3, 4096)
    put(lane, *other.writing(2))
    assert [hear(it), hear(it)] == [Written(2, 1), Written(2, 2)]
    assert it.call() == "revoke 2"


def test_a_host_that_stops_revokes_what_is_open_and_answers_for_all(bench: MakeBench) -> None:
    it, thing = bench(gated=("write",)), Thing(1, 2, 3, 4096)
    lane = start(it, Write(1, thing.said()), Push(1, 1, 0, 2, 0, 1), Push(1, 2, 0, 2, 1, 2))
    it.calls(2)
    assert not lane.stop(0)
    it.backend.gates["write"].release()
    assert hear(it) == Written(1, 1)
    assert outcomes(hear(it)) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.call() == "revoke 2"
    assert stored(it, thing) == [False, False]


@pytest.mark.parametrize("method", ["open_write", "commit"])
def test_a_call_that_raises_leaves_nothing_open(bench: MakeBench, method: str) -> None:
    """What it had done until then is not known; nothing of it may hold its key."""
    it, thing = bench(), Thing(1, 2, 3, 4096)
    thing.fill(it.arena)
    done = getattr(it.backend, method) if method == "open_write" else None

    def cut(places: Any, until: float) -> Any:
        if done is not None:
            done(places, until)
        raise Unreachable("the connection was cut")

    setattr(it.backend, method, cut)
    lane = start(it, *thing.writing(1))
    first = hear(it)
    assert (outcomes(first) or outcomes(hear(it))) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert it.suspected.is_set()
    assert not it.backend._writing
    delattr(it.backend, method)
    put(lane, *thing.writing(2))
    while (report := hear(it)).id == 1:
        pass
    assert report == Written(2, 1) and hear(it) == Written(2, 2)
    assert stored(it, thing) == [True, True]


def test_what_another_job_has_open_is_not_revoked_with_a_call_that_raises(bench: MakeBench) -> None:
    it, thing, both = bench(), Thing(1, 1, 3, 4096), Thing(1, 2, 3, 4096, at=1 << 16)
    thing.fill(it.arena)
    write, layers, publish, end = thing.writing(1)
    lane = start(it, write, layers)
    assert hear(it) == Written(1, 1)

    def cut(places: Any, until: float) -> Any:
        it.backend._writing[places[1].key] = bytearray()
        raise Unreachable("the connection was cut")

    it.backend.open_write = cut  # type: ignore[method-assign]
    put(lane, *both.writing(2))
    assert outcomes(hear(it)) == {0: ObjectStatus.FAILED, 1: ObjectStatus.FAILED}
    assert hear(it) == Written(2, 2)
    assert list(it.backend._writing) == thing.keys
    put(lane, publish, end)
    assert hear(it) == Written(1, 2)
    assert stored(it, thing) == [True]

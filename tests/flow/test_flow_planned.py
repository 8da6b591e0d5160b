"""Loads that a worker moves by itself: the core grants nothing of them, and waits for their end as for any other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from flow_world import of, submits

from layerflow.errors import InvalidTransition
from layerflow.flow import Flow
from layerflow.flow.commands import Cancel, Command, Commit, LoadFailed, LoadsDone, Release, Revoke, StepDone, Submit
from layerflow.flow.events import (
    BatchDone,
    BatchFailed,
    Direction,
    Event,
    FailedRange,
    FetchOpened,
    Item,
    LayersComputed,
    LayerShape,
    Limits,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
)

PARTS = (Part("a", 0, 3), Part("b", 0, 4))
NBYTES = 7 * 10 * 2


class Planned:
    """A session with one open step of two layers, whose loads are planned."""

    def __init__(self, saves: tuple[Part, ...] = (), limits: Limits | None = None) -> None:
        self.flow = Flow(limits or Limits())
        self.now = 100.0
        self.send(SessionOpened(0, (LayerShape(0, 10),) * 2))
        self.out = self.send(StepOpened(0, 1, 200.0, 300.0, PARTS, saves, planned=True))

    def send(self, event: Event) -> list[Command]:
        out = self.flow.handle(event, self.now)
        self.flow.validate()
        return out

    def save(self, out: list[Command]) -> list[Command]:
        """All that was granted of the saves is computed and stored."""
        said = self.send(LayersComputed(0, 1, 2))
        for batch in submits(out, Direction.SAVE):
            said += self.send(BatchDone(0, batch.batch))
        return said


def failed(commands: list[Command]) -> list[tuple[str, int, int]]:
    return [(each.request, each.lo, each.hi) for each in of(commands, LoadFailed)]


def test_nothing_of_them_is_granted_or_charged():
    world = Planned(limits=Limits(max_granted_bytes=2))
    assert not of(world.out, Submit)
    figures = world.flow.statistics()
    assert figures.load_inflight_bytes == 0 and figures.steps == 1


def test_their_end_ends_the_step():
    world = Planned()
    assert not of(world.send(StepClosed(0, 1, True)), StepDone)
    out = world.send(LoadsMoved(0, 1, NBYTES))
    assert of(out, LoadsDone) == [LoadsDone(0, 1)]
    assert of(out, StepDone) == [StepDone(0, 1, NBYTES, 0)]
    assert world.flow.statistics().loaded_bytes == NBYTES


def test_saves_wait_for_them():
    world = Planned(saves=PARTS)
    assert not of(world.save(world.out), Commit)
    assert of(world.send(LoadsMoved(0, 1, NBYTES)), Commit) == [Commit(0, 1, (0, 1))]


def test_what_failed_is_told_to_the_block_and_nothing_on_top_of_it_is_published():
    world = Planned(saves=PARTS)
    world.save(world.out)
    out = world.send(LoadsMoved(0, 1, 0, (FailedRange(0, 2, 4, "gone"), FailedRange(0, 2, 3, "gone"))))
    assert failed(out) == [("a", 2, 3), ("b", 3, 4)]
    assert of(out, LoadsDone) and not of(out, Commit)
    assert {part for each in of(out, Revoke) for part in each.parts} == {0, 1}


def test_what_failed_may_be_told_before_the_end():
    world = Planned(saves=PARTS)
    stored = world.save(world.out)
    out = world.send(LoadsLost(0, 1, (FailedRange(0, 1, 4, "gone"),)))
    assert failed(out) == [("a", 1, 3), ("b", 3, 4)] and not of(out, LoadsDone)
    assert sorted(part for each in of(out, Revoke) for part in each.parts) == [0, 1]
    out = world.send(LoadsMoved(0, 1, 0, (FailedRange(0, 0, 7, "late"),), 1))
    assert failed(out) == [("a", 0, 1), ("b", 4, 7)] and of(out, LoadsDone)
    assert not of(stored + out, Commit) and world.flow.statistics().failed_parts == 2


def test_an_end_does_not_come_true_without_what_was_to_be_told_before_it():
    world = Planned(saves=PARTS)
    world.save(world.out)
    world.send(LoadsLost(0, 1, (FailedRange(0, 0, 1, "gone"),)))
    with pytest.raises(InvalidTransition):
        world.send(LoadsLost(0, 1, (FailedRange(0, 4, 5, "gone"), FailedRange(0, 7, 8, "not there"))))
    with pytest.raises(InvalidTransition, match="2 failed ranges told, of 1 possible"):
        world.send(LoadsMoved(0, 1, 0, (), 2))
    assert world.flow.statistics().steps == 1


@pytest.mark.parametrize("cut", ["fence", "deadline"])
def test_loads_that_are_cut_off_end_whatever_was_told_of_them(cut):
    world = Planned(saves=PARTS)
    stored = world.save(world.out) + world.send(LoadsLost(0, 1, (FailedRange(0, 0, 1, "gone"),)))
    with pytest.raises(InvalidTransition):
        world.send(LoadsMoved(0, 1, 0))
    if cut == "deadline":
        world.now = 200.0
    out = world.send(Tick() if cut == "deadline" else LoadsFenced(0, 1, "the wait was cut"))
    assert failed(out) == [("a", 1, 3), ("b", 3, 7)] and not of(out, LoadsDone)
    out = world.send(LoadsMoved(0, 1, 0)) + world.send(StepClosed(0, 1, True))
    assert of(out, LoadsDone) and of(out, StepDone) and not of(stored + out, Commit)


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that run, loops' each time."""
    count, before = 0, sys.gettrace()

    def trace(_: FrameType, what: str, __: object) -> Any:
        nonlocal count
        count += what == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_part(count: int) -> tuple[tuple[Part, ...], list[FailedRange]]:
    """Every second block of a part is lost."""
    return (Part("a", 0, 2 * count),), [FailedRange(0, 2 * at, 2 * at + 1, "gone") for at in range(count)]


def one_request(count: int) -> tuple[tuple[Part, ...], list[FailedRange]]:
    """So is every part of a request, with a reason of its own."""
    return (Part("a", 0, 1),) * count, [FailedRange(0, at, at + 1, f"{at}") for at in reversed(range(count))]


def own_reasons(count: int) -> tuple[tuple[Part, ...], list[FailedRange]]:
    """Every request is lost with a reason of its own, first every second one: what is left to save lies in pieces."""
    order = [*range(0, count, 2), *range(1, count, 2)]
    return tuple(Part(f"{at}", 0, 1) for at in range(count)), [FailedRange(0, at, at + 1, f"{at}") for at in order]


def all_parts(count: int) -> tuple[tuple[Part, ...], list[FailedRange]]:
    """All parts are lost with every range."""
    return tuple(Part(f"{at}", 0, 1) for at in range(count)), [FailedRange(0, 0, count, "gone")] * count


@pytest.mark.parametrize("lost", [one_part, one_request, own_reasons, all_parts])
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
def test_ten_times_as_many_failed_ranges_are_ten_times_the_work(lost, aborted, earlier):
    def work(count: int) -> int:
        parts, ranges = lost(count)
        flow = Flow(Limits(max_granted_bytes=10))  # nearly all that is saved is yet to be granted
        flow.handle(SessionOpened(0, (LayerShape(0, 10),) * 2), 100.0)
        flow.handle(StepOpened(0, 1, 200.0, 300.0, parts, parts, planned=True), 100.0)
        for request in {part.request for part in parts} if aborted else ():
            flow.handle(RequestAborted(0, request), 100.0)
        few = count // 10 if earlier else count
        slices = [tuple(ranges[at : at + few]) for at in range(0, count, few)]

        def tell() -> None:
            for each in slices[:-1]:
                flow.handle(LoadsLost(0, 1, each), 100.0)
            assert of(flow.handle(LoadsMoved(0, 1, 0, slices[-1], count - few), 100.0), LoadsDone)

        lines = lines_run(tell)
        flow.validate()
        assert flow.statistics().failed_parts == (0 if aborted else len(parts))
        return lines

    assert work(500) < 12 * work(50)


def test_an_abort_is_released_when_nothing_moves_any_more():
    world = Planned()
    assert not of(world.send(RequestAborted(0, "a")), Release)
    assert of(world.send(LoadsMoved(0, 1, 0)), Release) == [Release(0, "a")]


def test_a_deadline_fails_them_and_waits_for_the_worker():
    world = Planned(saves=PARTS)
    world.now = 201.0
    out = world.send(Tick())
    assert failed(out) == [("a", 0, 3), ("b", 3, 7)]
    assert of(out, Cancel) and not of(out, LoadsDone), "their objects stay pinned"
    out = world.send(LoadsMoved(0, 1, 30, (FailedRange(0, 0, 7, "late"),)))
    assert of(out, LoadsDone) and not failed(out)


def test_a_fence_waits_for_the_worker():
    world = Planned()
    out = world.send(LoadsFenced(0, 1, "cut"))
    assert failed(out) == [("a", 0, 3), ("b", 3, 7)] and not of(out, LoadsDone)
    assert of(world.send(LoadsMoved(0, 1, 0)), LoadsDone)


def test_a_lost_session_ends_them():
    world = Planned(saves=PARTS)
    out = world.send(SessionLost(0))
    assert of(out, LoadsDone) and of(out, StepDone)
    assert world.send(LoadsMoved(0, 1, NBYTES)) == []
    assert world.flow.statistics().late_reports


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (LoadsMoved(0, 1, NBYTES + 1), "bytes"),
        (LoadsMoved(0, 1, -1), "bytes"),
        (LoadsMoved(0, 1, 0, (FailedRange(0, 0, 8, "x"),)), "does not load"),
        (LoadsMoved(0, 1, 0, (FailedRange(0, 3, 3, "x"),)), "does not load"),
        (LoadsMoved(0, 1, 0, (FailedRange(1, 0, 1, "x"),)), "does not load"),
        (LoadsLost(0, 1, (FailedRange(0, 1, 2, "x"), FailedRange(0, 6, 8, "x"))), "does not load"),
        (LoadsMoved(0, 1, 0, (), 1), "1 failed ranges"),
    ],
)
def test_an_end_that_cannot_be_changes_nothing(event, why):
    world = Planned()
    with pytest.raises(InvalidTransition, match=why):
        world.send(event)
    assert of(world.send(LoadsMoved(0, 1, NBYTES)), LoadsDone)
    assert world.send(LoadsMoved(0, 1, NBYTES)) == []


def test_an_end_of_loads_that_are_the_cores_to_grant():
    world = Planned()
    world.send(StepOpened(0, 2, 200.0, 300.0, PARTS))
    for event in (LoadsMoved(0, 2, 0), LoadsLost(0, 2, ())):
        with pytest.raises(InvalidTransition, match="not planned"):
            world.send(event)


def test_what_is_yet_to_be_fetched_cannot_be_planned():
    flow = Flow(Limits())
    flow.handle(SessionOpened(0, (LayerShape(0, 10),) * 2), 100.0)
    flow.handle(FetchOpened(1, "e", (0, 1), (Item(10, 3),)), 100.0)
    part = Part("a", 0, 3, (Need(1, 0, 0, 3),))
    with pytest.raises(InvalidTransition, match="yet to be fetched"):
        flow.handle(StepOpened(0, 1, 200.0, 300.0, (part,), (), planned=True), 100.0)
    flow.validate()
    assert flow.statistics().steps == 0


@pytest.mark.parametrize("report", [BatchDone(0, 1), BatchFailed(0, 1, "checksum")])
def test_no_report_of_a_batch_ends_them(report: Event):
    """The core counts them as a batch in flight, whose number it has told nobody."""
    world = Planned()
    with pytest.raises(InvalidTransition, match="moves by itself"):
        world.send(report)
    world.flow.validate()
    assert not of(world.send(StepClosed(0, 1, True)), StepDone)
    assert of(world.send(LoadsMoved(0, 1, NBYTES)), StepDone)
    assert world.flow.statistics().late_reports == 0

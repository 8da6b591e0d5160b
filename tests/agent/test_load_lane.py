"""When the load lane tells of what has ended: before it runs dry, once an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.agent.lanes.load import FEW_BATCHES, LoadLane
from layerflow.agent.lanes.task import CopyTask, EmulatedLink
from layerflow.ops.copier import CpuCopier


@pytest.fixture
def lane() -> LoadLane:
    """Its thread has ended: the test does what that does."""
    made = LoadLane(lambda *_: None, lambda: None, lambda _: None)
    made.close()
    return made


def task(*, all_granted: bool = False) -> CopyTask:
    step: Any = SimpleNamespace(frontier=0, fenced="", all_granted=all_granted)
    batch: Any = SimpleNamespace(layer=0, nbytes=1, gate=-1)
    report: Any = object()
    return CopyTask(batch, step, object.__new__(CpuCopier), EmulatedLink(0, 0), report=report)


def end_one(lane: LoadLane) -> bool:
    """A batch ends; is that told now?"""
    lane._report(lane._waiting.pop(0), "", None)
    told = lane._is_to_be_told()
    if told:
        lane._let_know()
    return told


def answer(lane: LoadLane, *tasks: CopyTask) -> None:
    """The server grants more."""
    for each in tasks:
        lane.put(each)
    lane._take_more(0.0)


def test_of_the_last_batches_of_a_window_the_first_is_told_and_the_last(lane: LoadLane) -> None:
    answer(lane, *(task() for _ in range(FEW_BATCHES + 4)))
    assert [end_one(lane) for _ in range(4)] == [False, False, False, True]
    assert [end_one(lane) for _ in range(FEW_BATCHES)] == [False] * (FEW_BATCHES - 1) + [True]


def test_behind_each_answer_it_is_told_again(lane: LoadLane) -> None:
    answer(lane, task(), task(), task())
    for _ in range(3):
        assert end_one(lane), "a window of few batches would move them one round trip at a time"
        answer(lane, task())


def test_where_no_more_is_to_come_nothing_but_the_last_is_told(lane: LoadLane) -> None:
    answer(lane, *(task(all_granted=True) for _ in range(4)))
    assert [end_one(lane) for _ in range(4)] == [False, False, False, True]

"""When saves leave during a forward pass: together where each is small, and not before their layers are computed."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.agent.lanes.save import FAST_LAYER_S, WORTH_BYTES, SaveLane
from layerflow.agent.lanes.task import CopyTask, EmulatedLink
from layerflow.device.base import CpuEvent
from layerflow.ops.copier import CpuCopier
from layerflow.ops.streamed import StreamCopier

SMALL = WORTH_BYTES // 4
LAYERS = 8


class Pass:
    """A step as the lane sees it."""

    def __init__(self, pace: float = 10 * FAST_LAYER_S) -> None:
        self.done: list[Any] = [None] * LAYERS
        self.closed = False
        self.saves_cancelled = ""
        self.expedited = False
        self._pace = pace

    @property
    def saves_expedited(self) -> bool:
        return self.closed or self.expedited or bool(self.saves_cancelled)

    def computed(self, layer: int) -> Any:
        return self.done[layer]

    def seconds_per_layer(self, now: float) -> float:
        return math.inf if self.expedited else self._pace

    def compute(self, layers: int) -> None:
        self.done[:layers] = [True] * layers


@pytest.fixture
def lane() -> SaveLane:
    """Its thread has ended: the test does what that does."""
    made = SaveLane(lambda *_: None, lambda _: None, lambda _: None)
    made.close()
    return made


def gate(lane: SaveLane, step: Pass, nbytes: int = SMALL, *, gbps: float = 0.0, on: type[Any] = CpuCopier) -> None:
    """Every layer of the pass waits to be saved."""
    copier, link = object.__new__(on), EmulatedLink(gbps, 0)
    for layer in range(LAYERS):
        batch: Any = SimpleNamespace(layer=layer, nbytes=nbytes, lo=0, hi=1)
        lane._gated.append(CopyTask(batch, step, copier, link, report=None))  # type: ignore[arg-type]


def leaving(lane: SaveLane) -> list[int]:
    return [job.batch.layer for job in lane._leaving()]


def test_small_saves_wait_until_a_call_is_worth_it(lane: SaveLane) -> None:
    step = Pass()
    gate(lane, step)
    step.compute(3)
    assert leaving(lane) == []
    step.compute(5)
    assert leaving(lane) == [0, 1, 2, 3, 4]
    step.compute(6)
    assert leaving(lane) == []


def test_a_large_save_waits_for_nothing_but_its_layer(lane: SaveLane) -> None:
    step = Pass()
    gate(lane, step, WORTH_BYTES)
    assert leaving(lane) == []
    step.compute(1)
    assert leaving(lane) == [0]
    assert leaving(lane) == []


@pytest.mark.parametrize("how", ["closed", "expedited"])
def test_small_saves_leave_when_nothing_joins_them_or_somebody_waits(lane: SaveLane, how: str) -> None:
    step = Pass()
    gate(lane, step)
    step.compute(2)
    assert leaving(lane) == []
    setattr(step, how, True)
    assert leaving(lane) == [0, 1]


def test_what_is_all_that_was_granted_leaves(lane: SaveLane) -> None:
    """The server grants no more before it has heard of these."""
    step = Pass()
    gate(lane, step)
    del lane._gated[2:]
    step.compute(2)
    assert leaving(lane) == [0, 1]


def test_a_slow_link_has_no_time_to_lose(lane: SaveLane) -> None:
    step = Pass()
    gate(lane, step, gbps=0.1)
    step.compute(2)
    assert leaving(lane) == [0]
    assert leaving(lane) == [1]


def test_on_the_cpu_a_layer_is_saved_once_its_event_is_set(lane: SaveLane) -> None:
    step, events = Pass(), [CpuEvent() for _ in range(LAYERS)]
    gate(lane, step, WORTH_BYTES)
    step.done[:] = events
    assert leaving(lane) == []
    for event in events[:2]:
        event.set()
    step.closed = True
    assert leaving(lane) == [0, 1]


def test_one_pass_that_waits_holds_up_no_other(lane: SaveLane) -> None:
    running, over = Pass(), Pass()
    gate(lane, running)
    gate(lane, over)
    running.compute(2)
    over.compute(LAYERS)
    over.closed = True
    assert leaving(lane) == list(range(LAYERS))
    assert leaving(lane) == []
    assert {job.step for job in lane._gated} == {running}


def test_a_fast_pass_is_saved_behind_it(lane: SaveLane) -> None:
    step = Pass(pace=FAST_LAYER_S / 2)
    gate(lane, step, WORTH_BYTES)
    step.compute(LAYERS)
    assert leaving(lane) == []


def test_on_a_device_a_save_leaves_with_its_layer_however_fast_the_engines_thread_is(lane: SaveLane) -> None:
    """That thread is ahead of what it enqueues: its pace says nothing of compute. The copy waits on the device."""
    step = Pass(pace=0.0)
    gate(lane, step, on=StreamCopier)
    assert leaving(lane) == []
    step.done[:2] = [CpuEvent(), CpuEvent()]
    assert leaving(lane) == [0]
    assert leaving(lane) == [1]
    assert leaving(lane) == []


def test_cancelled_saves_leave_at_once_to_be_given_up(lane: SaveLane) -> None:
    step = Pass(pace=0.0)
    gate(lane, step)
    step.saves_cancelled = "aborted"
    assert leaving(lane) == list(range(LAYERS))


def test_the_end_of_a_pass_is_told_although_another_pass_is_under_way() -> None:
    told = threading.Event()
    lane = SaveLane(lambda *_: None, lambda _: told.set(), lambda _: None)
    try:
        over, running = Pass(), Pass()
        gate(lane, running)
        over.closed = True
        job = lane._gated[0]
        lane._report(CopyTask(job.batch, over, job.copier, job.link, report=None), "", None)  # type: ignore[arg-type]
        lane.wake()
        assert told.wait(20)
        told.clear()
        lane._report(job, "", None)
        assert lane._unreported_since > 0.0, "more of this pass is to come: it is told with that"
    finally:
        lane._gated.clear()
        lane.close()

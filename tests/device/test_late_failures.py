"""What a device tells late or not at all: nothing is written behind a report, nothing stored that a failed load fed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.known import eventually

from device.simulated import Event, Machine
from device.test_streamed import Bench
from layerflow.agent.lanes.lanes import CompletionHandler, Lanes
from layerflow.agent.lanes.task import CopyTask, EmulatedLink
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.agent.values import AgentCounters
from layerflow.device.poller import Poller
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import Batch

PATIENCE_S = 10.0


def batch(number: int, direction: int, layer: int = 0) -> Batch:
    return Batch(1, number, direction, layer, 0, 1, 0, 0, 64, -1, False)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("dead", [False, True])
def test_a_save_whose_event_cannot_be_asked_writes_nothing_behind_its_report(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch, pinned: bool, dead: bool
) -> None:
    machine = Machine()
    bench = Bench(machine, arena, pinned=pinned)
    told: list[str] = []
    lost: list[BaseException] = []
    poller = Poller()
    ends = CompletionHandler(poller, lambda job, failure: told.append(failure), lost.append)
    ask = Event.query
    asked = threading.Event()

    def refuse_once(event: Event) -> bool:
        if not asked.is_set():
            asked.set()
            machine.broken = dead
            raise RuntimeError("operation not permitted now")
        return ask(event)

    monkeypatch.setattr(Event, "query", refuse_once)
    job = CopyTask(batch(1, SAVE), SimpleNamespace(), bench.copier, EmulatedLink(0, 0), None)  # type: ignore[arg-type]
    saved = bench.copier.save(bench.extents)
    with machine.running():
        ends.copied(job, "", saved)
        assert eventually(lambda: bool(told), PATIENCE_S) and "not permitted" in told[0]
        assert bool(lost) == dead
    poller.close()
    machine.broken = False
    if not dead:  # else the attachment has ended, and its room with it
        arena.array[:] = 7  # another object's
        machine.run()
    elif not pinned:
        arena.array[:] = 7
    if not (dead and pinned):
        bench.copier.drain()
        assert (arena.array == 7).all()


class Told:
    """An event that is done when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.asked = threading.Event()

    def query(self) -> bool:
        done = self.done.is_set()
        self.asked.set()
        return done

    def synchronize(self) -> None:
        self.done.wait()


class Replaced(Step):
    """The object that it loads is another one's by now, where it is asked to be."""

    __slots__ = ("replaced",)

    def fail_replaced(self) -> bool:
        return self.replaced


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    link: Any = SimpleNamespace(wake=lambda: None, flush=lambda: None, give_up=lambda error: None)
    lanes = Lanes(Machine().accelerator(), link, AgentCounters(), lambda step: None)
    yield lanes
    lanes.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_save_ends_behind_the_loads_that_it_was_computed_from(lanes: Lanes, replaced: bool) -> None:
    step = Replaced(
        1, groups=[0, 0], block_bytes=[64], loads=[], saves=[], deadline=1e9, save_deadline=1e9,
        device=Machine().accelerator(), pump=lambda: None, on_fenced=lambda *_: None, on_closed=lambda *_: None,
    )  # fmt: skip
    step.replaced = replaced
    report: Any = SimpleNamespace(done=[], failed=[])
    events = {}
    ends = lanes.load._tell
    # Layer 0 is loaded and saved, layer 1 is loaded: the poller asks 0's load first, and sees it done last.
    for number, direction, layer in ((1, LOAD, 0), (2, SAVE, 0), (3, LOAD, 1)):
        job = CopyTask(batch(number, direction, layer), step, None, EmulatedLink(0, 0), report)  # type: ignore[arg-type]
        event = events[number] = Told()
        step.begin(job.batch)
        step.end(job.batch, "", event)  # type: ignore[arg-type]
        ends(job, "", event)  # type: ignore[arg-type]
    events[2].done.set()
    for _ in range(3):
        events[1].asked.clear()
        assert events[1].asked.wait(PATIENCE_S)
    assert not report.done and not report.failed
    events[1].done.set()
    assert eventually(lambda: len(report.done) + len(report.failed) == 2, PATIENCE_S)
    assert [failure.batch for failure in report.failed] == ([2] if replaced else [])
    assert set(report.done) == ({1} if replaced else {1, 2}), "layer 1's load is no matter of layer 0's save"
    events[3].done.set()
    assert eventually(lambda: 3 in report.done, PATIENCE_S)

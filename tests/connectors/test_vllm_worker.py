"""The worker's side: a short prompt's saves, and what there is to tell, leave behind its answer and are not lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import BLOCK, BlockState, output, request, spec_of, tracked

from layerflow.agent import NoStep
from layerflow.agent.values import Ended
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import StepPlan
from layerflow.connectors.vllm.scheduler.saves import SavePlanner
from layerflow.connectors.vllm.worker import worker

WAIT_S = 20.0
REQUEST = "r"
BLOCKS = [3, 4]


class FakeAgent:
    """Opens steps that have nothing left to do, and knows what a layer takes."""

    def __init__(self, layer_seconds: float) -> None:
        self.costs = (None, SimpleNamespace(layer_seconds=lambda *_: layer_seconds))
        self.measured: deque[Any] = deque()
        self.opened: list[tuple[int, int]] = []
        self.saved = threading.Event()
        self.reading: set[str] = set()
        self.computed = object()
        self.recorded_on = 0

    def open_descriptors(
        self, loads: Any, saves: Any, work: Any = None, timeout_s: Any = None, after: Any = None
    ) -> NoStep:
        self.opened.append((len(loads), len(saves)))
        if saves:
            self.saved.set()
        return NoStep()

    def record(self) -> Any:
        self.recorded_on = threading.get_ident()
        return self.computed

    def reclaim(self, blocks: Any, timeout_s: float) -> int:
        return 0

    def doubt_reads(self) -> None:
        pass

    def overwritten(self, blocks: Any) -> int:
        return 0

    def busy(self, name: str) -> bool:
        return name in self.reading

    saving = busy

    def poll(self) -> Ended:
        return Ended()

    def close(self) -> None:
        pass


def side_of(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, *, settle_s: float) -> worker.WorkerSide:
    monkeypatch.setattr(worker, "SETTLE_S", settle_s)
    monkeypatch.setattr(worker, "TransferStats", SimpleNamespace)  # vLLM's, where it is stood in for, holds nothing
    layout = SimpleNamespace(spec=spec_of(), numbers={}, vllm_groups=(0,))
    return worker.WorkerSide(agent, layout, "ipc://x", several_groups=False, early=True)  # type: ignore[arg-type]


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent(layer_seconds=0.0)


@pytest.fixture
def side(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.WorkerSide]:
    made = side_of(agent, monkeypatch, settle_s=0.0)
    made.report()  # the first tells the layout
    yield made
    made.close()


def saving(fresh: tuple[tuple[int, ...], ...] = ()) -> StepPlan:
    """A step that computes a prompt of one chunk, and saves it."""
    planner, plan = SavePlanner(spec_of(), [0], [BLOCK], Options()), StepPlan(fresh=fresh)
    planner.open(tracked(request(REQUEST, 2 * BLOCK), spec_of()))
    planner.step(output({REQUEST: 2 * BLOCK}, state=BlockState({REQUEST: (list(BLOCKS),)})), plan)
    assert plan.saves and plan.work is not None
    return plan


def run(side: worker.WorkerSide, plan: StepPlan) -> None:
    """A pass, up to where vLLM asks what there is to tell."""
    side.prepare(plan)
    side.begin(plan)
    side.end()


def test_a_short_pass_saves_once_the_next_step_has_begun(side: worker.WorkerSide, agent: FakeAgent) -> None:
    plan = saving()
    side.prepare(plan)
    assert not side.begin(plan)  # vLLM skips its per-layer hooks
    side.end()
    assert not agent.opened
    run(side, StepPlan(leaving=(REQUEST,)))
    assert agent.saved.wait(WAIT_S) and agent.opened == [(0, 1)]


def test_what_a_short_pass_has_computed_is_recorded_on_the_engines_stream(
    side: worker.WorkerSide, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind: list[object] = []
    monkeypatch.setattr(side, "_mark_done", lambda _, event=None: behind.append(event))
    run(side, saving())
    assert agent.recorded_on == threading.get_ident()
    run(side, StepPlan())
    assert agent.saved.wait(WAIT_S)
    side.close()
    assert behind == [agent.computed]


def test_its_blocks_stay_until_it_is_saved(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(agent, monkeypatch, settle_s=600.0)
    run(side, saving())
    run(side, StepPlan(leaving=(REQUEST,)))
    assert side.transfers(forward=False)[0] == set()
    run(side, StepPlan(fresh=((BLOCKS[1], 9),)))  # which another request gets: now
    assert agent.opened == [(0, 1)]
    assert side.transfers(forward=False)[0] == {REQUEST}
    side.close()


def test_a_block_is_not_reused_over_a_save_that_waits_for_the_next_step(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of(agent, monkeypatch, settle_s=600.0)
    run(side, saving())
    side.prepare(StepPlan(fresh=((BLOCKS[0],),)))
    assert agent.opened == [(0, 1)]
    side.close()


def test_what_there_is_to_tell_waits_for_the_next_step(side: worker.WorkerSide, agent: FakeAgent) -> None:
    run(side, StepPlan())
    side._counters.add("revoked_saves", 1)
    run(side, saving())
    assert side.stats() is None and side.report() is None
    run(side, StepPlan())
    told = side.stats()
    assert told is not None and told.data == {"revoked_saves": 1}
    assert agent.saved.wait(WAIT_S)


def test_a_failed_load_is_told_at_once(side: worker.WorkerSide) -> None:
    run(side, saving())
    side._failures.shares["other"] = 0.5
    news = side.report()
    assert news is not None and news.failed == {"other": 0.5}


def test_closing_does_what_was_put_off(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(agent, monkeypatch, settle_s=600.0)
    run(side, saving())
    side.close()
    assert agent.opened == [(0, 1)]


def test_a_long_pass_saves_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent(worker.FAST_LAYER_S * 2)
    side = side_of(agent, monkeypatch, settle_s=600.0)
    plan = saving()
    side.prepare(plan)
    assert agent.opened == [(0, 1)] and side.begin(plan)
    side.end()
    side.close()
    assert agent.opened == [(0, 1)]


def test_a_step_that_does_not_concern_it_opens_nothing(side: worker.WorkerSide, agent: FakeAgent) -> None:
    plan = StepPlan()
    assert plan.empty
    run(side, plan)
    assert side.stats() is None and side.report() is None and not agent.opened


@pytest.mark.parametrize(("forward", "waits"), [(True, 0), (False, 1)], ids=["a decode step", "nothing to compute"])
def test_only_a_pass_that_computes_nothing_waits_for_background_loads(
    side: worker.WorkerSide, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, forward: bool, waits: int
) -> None:
    waited: list[float] = []

    class Loading(NoStep):
        """It is never over."""

        def wait_loaded(self, timeout_s: float) -> bool:
            waited.append(timeout_s)
            return False

    monkeypatch.setattr(agent, "open_descriptors", lambda *_, **__: Loading())
    monkeypatch.setattr(side, "_has_loaded", lambda *_: False)
    run(side, StepPlan(background={REQUEST: ["part"]}))  # type: ignore[list-item]
    assert side.transfers(forward=forward) == (set(), set(), set())
    assert waited == [worker.IDLE_WAIT_S] * waits

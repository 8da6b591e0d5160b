"""Hand-offs in the worker's side: loads with their own deadline, cut off or started over; saves that do not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_fakes import BLOCK, BlockState, output, request, spec_of, tracked

from layerflow.agent import FailedBlocks, LoadResult, Step
from layerflow.agent.descriptors import describe_loads
from layerflow.agent.values import READY, Ended, Hit, StepRequest
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.pd.conventions.parts import Convention, PrefillPart
from layerflow.connectors.vllm.pd.prefilling import PrefillHandoff
from layerflow.connectors.vllm.plan import StepPlan
from layerflow.connectors.vllm.scheduler.saves import SavePlanner
from layerflow.connectors.vllm.worker import worker

REQUEST = "r"


class LoadingStep(Step):
    """A background load whose end a test says."""

    def __init__(self, loads: list[Any]) -> None:
        self.number, self.loads, self.saves = 1, loads, []
        self.result: LoadResult | None = None
        self.closed_by_side = False

    def want_all(self) -> None:
        pass

    def wait_loaded(self, timeout_s: float) -> bool:
        return self.result is not None

    def wait_all(self) -> LoadResult:
        assert self.result is not None
        return self.result

    def close(self, ok: bool | None = None) -> None:
        self.closed_by_side = True


class FakeAgent:
    """Opens one load, and says what a test says of it."""

    def __init__(self) -> None:
        self.costs = (None, SimpleNamespace(layer_seconds=lambda *_: 0.0))
        self.measured: deque[Any] = deque()
        self.steps: list[LoadingStep] = []
        self.timeouts: list[float | None] = []
        self.aborted: list[str] = []
        self.touches = True
        self.opened_saves = 0
        self.opened: list[tuple[bool, bool]] = []

    def open_descriptors(
        self, loads: Any, saves: Any, work: Any = None, timeout_s: Any = None, after: Any = None
    ) -> LoadingStep:
        self.timeouts.append(timeout_s)
        self.opened_saves += len(saves)
        self.opened.append((bool(loads), bool(saves)))
        self.steps.append(LoadingStep(list(loads)))
        return self.steps[-1]

    def record(self) -> None:
        """It is on the cpu."""

    def abort(self, name: str) -> None:
        self.aborted.append(name)

    def busy(self, name: str) -> bool:
        return self.touches

    saving = busy

    def reclaim(self, blocks: Any, timeout_s: float) -> int:
        return 0

    def doubt_reads(self) -> None:
        pass

    def overwritten(self, blocks: Any) -> int:
        return 0

    def poll(self) -> Ended:
        return Ended()

    def close(self) -> None:
        pass


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def side(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.WorkerSide]:
    monkeypatch.setattr(worker, "TransferStats", SimpleNamespace)
    layout: Any = SimpleNamespace(spec=spec_of(), numbers={}, vllm_groups=(0,))
    made = worker.WorkerSide(agent, layout, "ipc://x", several_groups=False, early=True)  # type: ignore[arg-type]
    yield made
    made.close()


def loading(**plan: Any) -> StepPlan:
    followed = tracked(request(REQUEST, 3 * BLOCK), spec_of())
    asked = StepRequest(REQUEST, followed.chain, [np.array([5, 6, 7])], (0, 2 * BLOCK), Hit(2 * BLOCK))
    return StepPlan(background={REQUEST: describe_loads(spec_of(), [asked])}, **plan)


def run(side: worker.WorkerSide, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
    side.prepare(plan)
    side.begin(plan)
    side.end()
    return side.transfers(forward=True)


def test_a_load_may_take_as_long_as_its_hand_off(side: worker.WorkerSide, agent: FakeAgent) -> None:
    run(side, loading(timeouts={REQUEST: 7.5}))
    assert agent.timeouts == [7.5]


def test_an_aborted_load_is_told_once_when_nothing_touches_its_blocks(
    side: worker.WorkerSide, agent: FakeAgent
) -> None:
    assert run(side, loading()) == (set(), set(), set())
    assert run(side, StepPlan(aborted=(REQUEST,))) == (set(), set(), set())
    assert agent.aborted == [REQUEST]
    agent.steps[0].result = READY  # its copies are not over yet: the agent still says that it is busy
    assert run(side, StepPlan()) == (set(), set(), set())
    agent.touches = False
    assert run(side, StepPlan()) == (set(), {REQUEST}, set())
    assert run(side, StepPlan()) == (set(), set(), set())
    assert agent.steps[0].closed_by_side


@pytest.mark.parametrize("restarts", [True, False])
def test_a_failed_load_is_told_by_request_where_it_starts_over(
    restarts: bool, side: worker.WorkerSide, agent: FakeAgent
) -> None:
    run(side, loading(restarts=restarts))
    agent.steps[0].result = LoadResult((FailedBlocks(REQUEST, 0, (1,), "lost"),))
    told = run(side, StepPlan(restarts=restarts))
    assert told == (set(), {REQUEST}, {REQUEST} if restarts else set())
    assert side.failed_blocks() == (set() if restarts else {6})


@pytest.mark.parametrize("promised", [True, False])
def test_saves_that_a_decode_engine_waits_for_are_not_deferred(
    promised: bool, side: worker.WorkerSide, agent: FakeAgent
) -> None:
    planner, plan = SavePlanner(spec_of(), [0], [BLOCK], Options()), StepPlan()
    followed = tracked(request(REQUEST, 2 * BLOCK), spec_of())
    if promised:
        part = PrefillPart(handoff="h", convention=Convention.TWO_PHASE, prompt="")
        followed.handoff = PrefillHandoff(part, 2 * BLOCK)
    planner.open(followed)
    planner.step(output({REQUEST: 2 * BLOCK}, state=BlockState({REQUEST: ([3, 4],)})), plan)
    assert plan.awaited is promised
    side.prepare(plan)
    assert bool(agent.opened_saves) is promised


def test_a_step_that_loads_a_hand_off_saves_nothing_for_another(side: worker.WorkerSide, agent: FakeAgent) -> None:
    """Else two engines could wait for each other's saves, each for its own loads first."""
    planner, plan = SavePlanner(spec_of(), [0], [BLOCK], Options()), loading()
    prefilled = tracked(request("p", 2 * BLOCK), spec_of())
    part = PrefillPart(handoff="h", convention=Convention.TWO_PHASE, prompt="")
    prefilled.handoff = PrefillHandoff(part, 2 * BLOCK)
    planner.open(prefilled)
    planner.step(output({"p": 2 * BLOCK}, state=BlockState({"p": ([3, 4],)})), plan)
    side.prepare(plan)
    side.begin(plan)
    assert sorted(agent.opened) == [(False, True), (True, False)]

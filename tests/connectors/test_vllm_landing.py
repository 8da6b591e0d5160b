"""On a device a wait ends when the copy is enqueued: what fails behind that still reaches vLLM, and is never published.

The device is simulated and stands still until it is told to run; agent, server and worker's side are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from device.simulated import Machine
from device.streaming import HERE, LAYERS, PATIENCE_S, PATIENT, SPEC, THERE, TOKENS, Engine
from e2e.known import eventually

from layerflow import EmbeddedServer, StepRequest
from layerflow.agent.descriptors import describe_loads
from layerflow.agent.step.step import Step
from layerflow.connectors.vllm.plan import StepPlan, WorkerReport
from layerflow.connectors.vllm.worker.worker import WorkerSide

NAMES = [f"layer.{layer}" for layer in range(LAYERS)]
BLOCKS = {int(block) for block in THERE}


class Worker:
    """vLLM's worker, with an engine on a stream of its own."""

    def __init__(self, machine: Machine, server: EmbeddedServer, *, several_groups: bool) -> None:
        self.machine = machine
        self.engine = Engine(machine, server)
        assert self.engine.agent.wait_warm(PATIENCE_S)
        numbers = {name: layer for layer, name in enumerate(NAMES)}
        layout: Any = SimpleNamespace(spec=SPEC, numbers=numbers, vllm_groups=(0,))
        self.side = WorkerSide(
            self.engine.agent, layout, "ipc://x", several_groups=several_groups, early=False, in_flight=2
        )
        assert self.side.report() is not None, "the first report brings the layout"
        with machine.running():
            self.engine.save("one")

    def run(self, plan: StepPlan, behind: Callable[[], None] | None = None) -> None:
        """A step; its work is enqueued, and nothing of it done where the machine stands still.

        :param behind: takes the step's report where vLLM ends the step behind that, for its draft model runs then.
        """
        with self.machine.stream(self.engine.stream):
            self.side.prepare(plan)
            self.side.begin(plan)
            self.side.wait_tails()
            for layer, name in enumerate(NAMES):
                self.side.wait_layer(name)
                self.engine.attend(layer)
                self.side.layer_done(name)
            if behind is not None:
                assert self.side.transfers(forward=True) == (set(), set(), set())
                behind()
            self.side.end()

    def report(self) -> tuple[set[int], WorkerReport]:
        """What vLLM hears behind a step."""
        blocks = self.side.failed_blocks()
        return blocks, self.side.report() or WorkerReport()

    def replace(self) -> None:
        """Another object takes the place of each that the hit has named."""
        step = next(step for step in self.engine.agent._steps.all() if step.residents is not None)
        assert step.residents is not None
        step.residents._memory[step.generation_words[0] >> 3] += 1


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=1)


@pytest.fixture(params=[False, True], ids=["one group", "several groups"])
def worker(machine: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Worker]:
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    with EmbeddedServer(PATIENT) as server:
        worker = Worker(machine, server, several_groups=request.param)
        yield worker
        with machine.running():
            worker.side.close()


def _plan(worker: Worker, name: str, **more: Any) -> StepPlan:
    return StepPlan(number=1, loads=describe_loads(SPEC, [worker.engine.request(name)]), depends_on_load=True, **more)


def _saves(machine: Machine) -> int:
    return sum(call.thread == "layerflow-save" for call in machine.calls)


def test_a_step_has_run_once_the_device_has_ended_its_loads(machine: Machine, worker: Worker) -> None:
    worker.run(_plan(worker, "two"))
    blocks, news = worker.report()
    assert not blocks
    assert not news.ran, "the device has copied nothing yet"
    with machine.running():
        assert eventually(lambda: worker.report()[1].ran == {1: 1}, PATIENCE_S)
        worker.engine.assert_saw_all()


def test_a_failure_behind_the_waits_is_told_with_the_step(machine: Machine, worker: Worker) -> None:
    worker.run(_plan(worker, "two"))
    worker.report()
    worker.replace()
    reports = []
    with machine.running():
        assert eventually(lambda: reports.append(worker.report()) or reports[-1][1].ran, PATIENCE_S)  # type: ignore[func-returns-value]
    blocks, news = reports[-1]
    assert news.ran == {1: 1}
    assert news.failed == {"two": 1.0}
    assert (blocks, news.lost) == ((set(), {"two"}) if worker.side._failures._several_groups else (BLOCKS, frozenset()))
    assert worker.report() == (set(), WorkerReport()), "once"


def test_a_step_that_ends_behind_its_report_has_run_with_the_next_one(machine: Machine, worker: Worker) -> None:
    """Both runners of vLLM report before their draft model runs, and end the step behind that."""
    reports: list[tuple[set[int], WorkerReport]] = []
    with machine.running():
        worker.run(_plan(worker, "two"), lambda: reports.append(worker.report()))
        worker.engine.assert_saw_all()
        worker.run(StepPlan(), lambda: reports.append(worker.report()))
        assert eventually(lambda: reports.append(worker.report()) or any(news.ran for _, news in reports), PATIENCE_S)  # type: ignore[func-returns-value]
    assert not reports[0][1].ran, "its draft model may still find a load that has failed"
    assert not any(blocks or news.lost for blocks, news in reports)


def test_a_failure_behind_such_a_report_is_told_with_the_next_one(machine: Machine, worker: Worker) -> None:
    reports: list[tuple[set[int], WorkerReport]] = []
    worker.run(_plan(worker, "two"), lambda: reports.append(worker.report()))
    assert reports[0][0] == set() and not (reports[0][1].ran or reports[0][1].lost)
    worker.replace()
    with machine.running():
        assert eventually(lambda: reports.append(worker.report()) or reports[-1][1].ran, PATIENCE_S)  # type: ignore[func-returns-value]
    blocks, news = reports[-1]
    assert (blocks, news.lost) == ((set(), {"two"}) if worker.side._failures._several_groups else (BLOCKS, frozenset()))
    assert news.ran == {1: 1}


def test_a_background_load_has_arrived_once_the_device_has_ended_it(machine: Machine, worker: Worker) -> None:
    plan = StepPlan(background={"two": describe_loads(SPEC, [worker.engine.request("two")])}, restarts=True)
    worker.run(plan)
    step = next(iter(worker.side._background.values()))
    assert isinstance(step, Step)
    assert eventually(lambda: not step.loading, PATIENCE_S), "all is enqueued"
    assert worker.side.transfers(forward=True) == (set(), set(), set())
    worker.replace()
    with machine.running():
        assert eventually(lambda: worker.side.transfers(forward=True) == (set(), {"two"}, {"two"}), PATIENCE_S)


def test_what_a_step_saves_behind_such_a_load_is_not_published(machine: Machine, worker: Worker) -> None:
    """The agent alone: its step loads half of a prompt and saves all of another that begins so."""
    agent, engine = worker.engine.agent, worker.engine
    longer = agent.chain([*TOKENS, *range(1000, 1000 + 32)])
    hit = agent.lookup("two", longer)
    assert hit.tokens >= len(TOKENS) - 1
    blocks = [*THERE, *HERE[:2]]
    request = StepRequest("two", longer, (blocks,), load=(0, hit.tokens), save=(len(TOKENS), len(longer)), hit=hit)
    saved = _saves(machine)
    with machine.stream(engine.stream), agent.open_step([request]) as step:
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            engine.attend(layer)
            step.layer_done(layer)
    assert isinstance(step, Step)
    assert not step.all_landed
    assert eventually(lambda: _saves(machine) == saved + LAYERS, PATIENCE_S), "all is enqueued"
    worker.replace()
    with machine.running():
        assert agent.wait_idle("two", PATIENCE_S)
        assert step.all_landed
        assert {number for failed in step.failed for number in failed.blocks} == set(range(len(THERE)))
        ended = agent.poll()
        assert "two" not in ended.saved
        assert "two" in {request for request, _ in ended.failed_saves}


def test_what_other_requests_save_in_a_step_with_such_a_load_is_not_published(machine: Machine, worker: Worker) -> None:
    """They may have been computed from its blocks, which vLLM's own prefix cache lets them share."""
    agent, engine = worker.engine.agent, worker.engine
    other = agent.chain(TOKENS[::-1])
    asked = StepRequest("other", other, (HERE,), save=(0, len(TOKENS)))
    saved = _saves(machine)
    with machine.stream(engine.stream), agent.open_step([engine.request("two"), asked]) as step:
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            engine.attend(layer)
            step.layer_done(layer)
    assert eventually(lambda: _saves(machine) == saved + LAYERS, PATIENCE_S), "all is enqueued"
    worker.replace()
    with machine.running():
        assert agent.wait_idle("other", PATIENCE_S)
        assert "other" in {request for request, _ in agent.poll().failed_saves}
        assert agent.lookup("check", other).tokens == 0

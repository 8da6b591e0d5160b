"""Figures of finished steps are worked out after everybody has been told of their end, once each."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from device.simulated import Machine
from e2e.known import KnownWorker, eventually
from server.support import Embed, worker_on

from agent.scene import SPEC, Scene
from layerflow.agent.costs import KEPT_STEPS, PATIENCE_S, LoadPolicy, Measures
from layerflow.agent.step.step import Step
from layerflow.agent.steps import OpenSteps
from layerflow.device import device_for
from layerflow.observe.trace import Span


def ended_step() -> Step:
    step = Scene().step
    for layer in range(2):
        step.layer_done(layer)
    step.close()
    step.over(7)
    return step


@pytest.fixture
def measures() -> Measures:
    return Measures(LoadPolicy(SPEC), device_for("cpu"))


def test_a_step_is_worked_out_a_moment_after_its_end_and_once(measures: Measures) -> None:
    assert not measures.pending
    step = ended_step()
    began = time.monotonic()
    measures.ended(step)
    assert measures.pending
    assert measures.work_out(began + PATIENCE_S / 2) == [] and measures.pending
    (figures,) = measures.work_out(time.monotonic() + PATIENCE_S)
    assert figures.step == step.number
    assert [trace.session for trace in measures.traces] == [7]
    assert [measured.step for measured in measures.measured] == [step.number]
    assert not measures.pending and measures.work_out() == []


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_on_a_device_its_own_events_say_how_long_layers_were_computed(kind: str) -> None:
    """There the engine's spans are those of enqueueing."""
    machine = Machine()
    device = machine.accelerator() if kind == "cuda" else device_for("cpu")
    advisor = LoadPolicy(SPEC)
    measures = Measures(advisor, device)
    for tokens in range(1, 20):
        step = Scene(device=device).step
        if kind == "cuda":
            step.loads = []  # one that loads has layers that wait, by the device's clock
        for layer in range(2):
            step.layer_done(layer, None if kind == "cpu" else machine.event_at((layer + 1) * tokens * 2e-3))
        step.close()
        step.over(7)
        step.work = (tokens, 0)
        step.trace.spans.append(Span("load", 0, 1.0, 1.0 + tokens * 1e-3, tokens << 10, 1, False))
        for layer in range(2):
            ended = 1.0 + (layer + 1) * tokens * 1e-3
            step.trace.spans.append(Span("compute", layer, ended - tokens * 1e-3, ended))
        measures.ended(step)
    measures.work_out()
    link, compute = advisor.costs
    assert link is not None
    assert compute is not None
    assert compute.layer_seconds(10, 0) == pytest.approx(0.02 if kind == "cuda" else 0.01, rel=0.2)


def test_who_cannot_wait_gets_them_at_once_in_the_order_of_their_ends(measures: Measures) -> None:
    steps = [ended_step() for _ in range(KEPT_STEPS + 2)]
    for number, step in enumerate(steps):
        step.number = step.trace.step = number
        measures.ended(step)
    assert [figures.step for figures in measures.work_out()] == list(range(KEPT_STEPS + 2))
    assert [trace.step for trace in measures.traces] == list(range(2, KEPT_STEPS + 2))


def test_whoever_waits_for_a_steps_end_finds_it_noted() -> None:
    open_steps, noted = OpenSteps(), []
    step = ended_step()
    with open_steps.lock:
        open_steps.add(step)

    def ended(one: Step) -> None:
        assert open_steps.busy("a"), "nobody is told before"
        noted.append(one)

    open_steps.remove(step, ended)
    open_steps.remove(step, ended)
    assert noted == [step]
    assert not open_steps.busy("a")


@pytest.fixture
def worker(embed: Embed) -> Iterator[KnownWorker]:
    with worker_on(embed()) as worker:
        yield worker


def test_traces_are_complete_once_a_step_has_ended(worker: KnownWorker) -> None:
    for number in range(1, 6):
        worker.serve(worker.prompt(40))
        assert len(worker.agent.traces) == number


def test_nobody_has_to_ask_for_the_figures(worker: KnownWorker) -> None:
    worker.serve(worker.prompt(40))
    assert eventually(lambda: len(worker.agent.measured) == 1)

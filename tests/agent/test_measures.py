"""Figures of finished steps are worked out after everybody has been told of their end, once each."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from e2e.known import KnownWorker, eventually
from server.support import Embed, worker_on

from agent.scene import SPEC, Scene
from layerflow.agent.costs import KEPT_STEPS, PATIENCE_S, LoadPolicy, Measures
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.step.step import Step


def ended_step() -> Step:
    step = Scene().step
    for layer in range(2):
        step.layer_done(layer)
    step.close()
    step.over(7)
    return step


@pytest.fixture
def measures() -> Measures:
    return Measures(LoadPolicy(SPEC), spans_are_transfers=True)


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

    open_steps.finish(step, ended)
    open_steps.finish(step, ended)
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

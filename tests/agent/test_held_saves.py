"""Saves that wait for the engine's verdict: nothing is published before it, everything or nothing after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of

from layerflow.agent import Step
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
PROMPT = 60  # three whole chunks and a tail


@pytest.fixture(params=[0, 16], ids=["one group", "two groups"])
def worker(request: pytest.FixtureRequest, embed: Embed) -> KnownWorker:
    server = embed()
    return KnownWorker(server.endpoint, small_spec(window=request.param), context=server.context)


def computed(worker: KnownWorker) -> tuple[Run, Step]:
    """A step that has ended and whose saves are held, though some layers have left."""
    run = worker.admit(worker.prompt(PROMPT), look=False)
    step = step_of(worker.agent.open_step([run.request()]))
    step.hold_saves()
    with step:
        worker.forward(step, [run])
    eventually(lambda: worker.agent.statistics().saved_bytes > 0)
    return run, step


def test_nothing_is_published_before_the_verdict(worker: KnownWorker) -> None:
    run, step = computed(worker)
    assert not worker.agent.wait_idle(run.name, 0.0)
    assert worker.agent.lookup("other", run.chain).tokens == 0
    assert not worker.agent.poll().saved
    worker.agent.release_saves(step, sound=True)
    assert worker.agent.wait_idle(run.name, 20)
    assert worker.agent.lookup("other", run.chain).tokens == PROMPT - 1


def test_what_is_not_sound_is_never_published(worker: KnownWorker) -> None:
    run, step = computed(worker)
    worker.agent.release_saves(step, sound=False)
    assert worker.agent.wait_idle(run.name, 20)
    assert worker.agent.lookup("other", run.chain).tokens == 0
    ended = worker.agent.poll()
    assert not ended.saved
    assert {request for request, _ in ended.failed_saves} == {run.name}


def test_recycled_blocks_do_not_wait_for_a_verdict(worker: KnownWorker) -> None:
    run, step = computed(worker)
    assert worker.agent.reclaim(run.tables, 20.0) == 1
    worker.agent.release_saves(step, sound=True)  # it comes too late
    assert worker.agent.wait_idle(run.name, 20)
    assert worker.agent.lookup("other", run.chain).tokens == 0

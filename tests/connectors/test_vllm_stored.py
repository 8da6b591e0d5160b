"""Which chunks count as stored: whole ones that were given room, and of which no save has failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e.known import KnownWorker, Run

from layerflow.agent.step.step import NO_STEP
from layerflow.connectors.vllm.worker.outcome import StoredChunks
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]


@pytest.fixture
def worker(embed: Embed) -> KnownWorker:
    server = embed()
    return KnownWorker(server.endpoint, context=server.context)


def save(worker: KnownWorker, run: Run, stored: StoredChunks) -> None:
    """Compute a prompt; returns when its saves have ended and `stored` knows."""
    with worker.agent.open_step([run.request()]) as step:
        stored.opened(step)
        worker.forward(step, [run])
    assert worker.agent.wait_idle(run.name, 20)
    hear(worker, stored)


def hear(worker: KnownWorker, stored: StoredChunks) -> None:
    over = stored.over(worker.agent.busy)
    stored.publish(over, [request for request, _ in worker.agent.poll().failed_saves])


def test_whole_chunks_once(worker: KnownWorker) -> None:
    stored = StoredChunks(16)
    run = worker.admit(worker.prompt(60))
    save(worker, run, stored)
    assert stored.take() == {(0, digest): 1 for digest in run.chain.digests}
    assert stored.take() == {}
    assert len(run.chain.digests) == 3


def test_nothing_is_known_before_the_saves_have_ended(worker: KnownWorker) -> None:
    stored = StoredChunks(16)
    run = worker.admit(worker.prompt(60))
    with worker.agent.open_step([run.request()]) as step:
        stored.opened(step)
        hear(worker, stored)
        assert stored.take() == {}
        worker.forward(step, [run])
    assert worker.agent.wait_idle(run.name, 20)
    hear(worker, stored)
    assert len(stored.take()) == 3


def test_what_was_there_already_is_not_stored_again(worker: KnownWorker) -> None:
    stored = StoredChunks(16)
    first = worker.admit(worker.prompt(40))
    save(worker, first, stored)
    stored.take()
    second = worker.admit(worker.prompt(60, like=first.chain, shared=32), look=False)
    save(worker, second, stored)
    assert stored.take() == {(0, second.chain.digests[2]): 1}


def test_saves_that_were_given_up_do_not_count(worker: KnownWorker) -> None:
    stored = StoredChunks(16)
    run = worker.admit(worker.prompt(60))
    step = worker.agent.open_step([run.request()])
    stored.opened(step)
    worker.compute(run, 0, 0, 60)
    step.layer_done(0)
    step.close()
    assert worker.agent.wait_idle(run.name, 20)
    hear(worker, stored)
    assert stored.take() == {}
    assert stored.over(worker.agent.busy) == []


def test_a_pool_without_room_stores_nothing(embed: Embed) -> None:
    server = embed(pool__size="64KiB")
    with KnownWorker(server.endpoint, context=server.context) as worker:
        stored = StoredChunks(16)
        run = worker.admit(worker.prompt(800))
        save(worker, run, stored)
        count = len(stored.take())
        assert 0 < count < len(run.chain.digests)
        assert worker.agent.lookup("again", run.chain).tokens == count * 16


def test_a_step_with_nothing_to_move_is_nobodys() -> None:
    stored = StoredChunks(16)
    stored.opened(NO_STEP)
    assert stored.over(lambda _: False) == []

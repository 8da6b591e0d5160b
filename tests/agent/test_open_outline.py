"""Outlines that a scheduler makes in another process: the worker opens the very step that it would have made itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from e2e.known import KnownWorker, Run, small_spec, step_of

from layerflow.agent import NoStep
from layerflow.agent.costs import work_of
from layerflow.agent.descriptors import PartDescriptor, describe_loads, describe_saves
from layerflow.errors import SpecError
from layerflow.server import EmbeddedServer
from layerflow.wire.messages import Message, OpenStep

Embed = Callable[..., EmbeddedServer]


def worker_on(server: EmbeddedServer) -> KnownWorker:
    return KnownWorker(server.endpoint, small_spec(4, window=9), context=server.context)


def outlines(worker: KnownWorker, run: Run) -> tuple[list[PartDescriptor], list[PartDescriptor]]:
    """As they arrive from another process."""
    asked = [run.request()]
    made = describe_loads(worker.spec, asked), describe_saves(worker.spec, asked, partial=True)
    loads, saves = pickle.loads(pickle.dumps(made))
    return loads, saves


def serve(worker: KnownWorker, run: Run) -> None:
    loads, saves = outlines(worker, run)
    with worker.agent.open_descriptors(loads, saves, timeout_s=20) as step:
        assert worker.forward(step, [run]) == 0
    assert not run.failed
    assert worker.agent.wait_idle(run.name, 20)


@pytest.mark.parametrize("discard", [False, True])
def test_the_messages_are_those_of_open_step(embed: Embed, discard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_on(embed(transfer__discard_partial_chunks=discard)) as worker:
        stored = worker.prompt(41)
        worker.serve(stored)
        run = worker.admit(worker.prompt(77, like=stored, shared=41))
        sent = []
        with monkeypatch.context() as patched:
            patched.setattr(worker.agent._link, "send", sent.append)
            own = step_of(worker.agent.open_step([run.request()]))
            loads, saves = outlines(worker, run)
            other = step_of(worker.agent.open_descriptors(loads, saves, work=work_of([run.request()])))
        first, second = [message for message in sent if isinstance(message, OpenStep)]
        assert (first.loads, first.saves) == (second.loads, second.saves)
        assert all(bool(part.parent) != discard for part in first.saves)
        assert own.work == other.work == (77 - run.hit.tokens, run.hit.tokens)
        assert first.deadline - second.deadline == pytest.approx(0.0, abs=30.0)


def test_the_round_trip(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        stored = worker.prompt(41)
        for hit in (0, 40):
            run = worker.admit(stored)
            assert run.hit.tokens == hit
            serve(worker, run)
        longer = worker.admit(worker.prompt(77, like=stored, shared=41))
        assert longer.hit.tokens == 41
        serve(worker, longer)


def test_partial_tails_are_left_out_where_none_are_kept(embed: Embed) -> None:
    with worker_on(embed(transfer__discard_partial_chunks=True)) as worker:
        run = worker.admit(worker.prompt(41))
        serve(worker, run)
        assert worker.agent.lookup("again", run.chain).tokens == 32
        short = worker.admit(worker.prompt(9))
        assert isinstance(worker.agent.open_descriptors(*outlines(worker, short)), NoStep)


def test_without_a_server_loads_fail_and_nothing_is_saved(embed: Embed) -> None:
    server = embed()
    with worker_on(server) as worker:
        stored = worker.prompt(41)
        worker.serve(stored)
        run = worker.admit(worker.prompt(60, like=stored, shared=41), planned=False)
        loads, saves = outlines(worker, run)
        with worker.agent._link._turn:  # or the link would say what it hears
            worker.agent._steps.silent = True
            assert isinstance(worker.agent.open_descriptors([], saves), NoStep)
            worker.agent._steps.silent = False
        worker.agent._dispatcher.lost("gone for this test")
        assert isinstance(worker.agent.open_descriptors([], saves), NoStep)
        with worker.agent.open_descriptors(loads, saves) as step:
            assert not step.wait_layer(0)
        assert {failed.request for failed in step.failed} == {run.name}
        assert not worker.agent.busy(run.name)


def test_an_outline_into_blocks_that_are_not_there(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        run = worker.admit(worker.prompt(41))
        loads, saves = outlines(worker, run)
        for table in (saves[0].table + worker.blocks, saves[0].table[:3]):
            with pytest.raises(SpecError, match=run.name):
                worker.agent.open_descriptors(loads, [replace(saves[0], table=table)])
        with pytest.raises(SpecError, match="timeout_s"):
            worker.agent.open_descriptors(loads, saves, timeout_s=-1)
        assert worker.agent.statistics().open_steps == 0
        assert np.array_equal(saves[0].engine_blocks(), run.tables[0])


def test_a_step_is_told_to_the_server_it_was_opened_with(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the one under which a lost server's steps are cut off."""
    with worker_on(embed()) as worker:
        agent, locked = worker.agent, []
        send = agent._link.send

        def noted(message: Message) -> None:
            if isinstance(message, OpenStep):
                locked.append(agent._steps.lock.locked())
            send(message)

        monkeypatch.setattr(agent._link, "send", noted)
        worker.serve(worker.prompt(40))
        assert locked == [True]

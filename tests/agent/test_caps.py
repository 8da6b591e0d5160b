"""Caps and the prefetch window hold where bytes move: in every native call, over all sessions, however it is waited."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerflow.agent.dispatcher import Dispatcher
from layerflow.agent.lanes import load as load_lane
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.config.settings import Settings, TransferSettings
from layerflow.server import EmbeddedServer
from layerflow.wire.messages import Grant, ToClient

from .recording import Calls, recorded

LAYERS = 8
TOKENS = 200
BLOCK_BYTES = 4 * 64
PATIENCE_S = 20.0
Wait = Callable[[Step], bool]


@contextmanager
def serving(workers: int = 1, **transfer: Any) -> Iterator[tuple[EmbeddedServer, list[KnownWorker]]]:
    """A server, and workers of different models on it."""
    with ExitStack() as stack:
        settings = Settings(pool={"size": "16MiB"}, transfer={"step_timeout_ms": 60_000} | transfer)
        server = stack.enter_context(EmbeddedServer(settings))
        made = [
            KnownWorker(server.endpoint, small_spec(LAYERS, content=str(n)), context=server.context)
            for n in range(workers)
        ]
        yield server, [stack.enter_context(worker) for worker in made]


def loaded(worker: KnownWorker, run: Run, wait: Wait) -> None:
    """Load the run's hit, waiting in one way, and check every byte."""
    with step_of(worker.agent.open_step([run.request(save=False)])) as step:
        assert wait(step), step.failed
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            assert not worker.wrong_bytes(run, layer, 0, run.hit.tokens)
    assert worker.agent.wait_idle(run.name, PATIENCE_S)


def layer_by_layer(step: Step) -> bool:
    return all(step.wait_layer(layer) for layer in range(LAYERS))


def in_the_background(step: Step) -> bool:
    step.want_all()
    return eventually(lambda: not step.loading) and bool(step.wait_all())


WAITS: dict[str, Wait] = {
    "layer by layer": layer_by_layer,
    "all at once": lambda step: bool(step.wait_all()),
    "until they have ended": lambda step: step.wait_loaded(PATIENCE_S) and bool(step.wait_all()),
    "in the background": in_the_background,
}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("depth", [1, 2, LAYERS, 1000])
def test_a_hit_loads_whatever_the_prefetch_window_and_the_way_to_wait(depth: int, how: str) -> None:
    with serving(prefetch_layers=depth) as (_, [worker]):
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        run = worker.admit(chain)
        assert run.hit.tokens == TOKENS - 1  # it ends within a block
        with recorded() as calls:
            loaded(worker, run, WAITS[how])
        for call in calls.of(LOAD):
            assert max(call.layers) <= call.frontier + depth
        assert not worker.agent.statistics().fenced_steps


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.sampled_from([1, 3, 100, 4096]),
    nbytes=st.sampled_from([4 << 10, 6000, 64 << 20]),
    inflight=st.sampled_from([2, 3, 8]),
    depth=st.sampled_from([0, 1, 3]),
    how=st.sampled_from(sorted(WAITS)),
    workers=st.sampled_from([1, 3]),
)
def test_no_call_is_above_a_cap_and_no_more_is_in_flight(
    blocks: int, nbytes: int, inflight: int, depth: int, how: str, workers: int
) -> None:
    limits = {"max_transfer_blocks": blocks, "max_transfer_bytes": nbytes, "max_inflight_bytes": inflight * nbytes}
    with serving(workers, prefetch_layers=depth, **limits) as (_, all_workers), recorded() as calls:
        chains = [worker.prompt(TOKENS) for worker in all_workers]
        for worker, chain in zip(all_workers, chains, strict=True):
            worker.serve(chain)
        for worker, chain in zip(all_workers, chains, strict=True):
            loaded(worker, worker.admit(chain), WAITS[how])
        assert_within(calls, limits)


def test_saves_of_many_sessions_that_are_computed_at_once_stay_within_the_budget() -> None:
    limits = {"max_transfer_blocks": 4096, "max_transfer_bytes": 4 << 10, "max_inflight_bytes": 32 << 10}
    with serving(6, **limits) as (_, workers), recorded() as calls:
        runs = [worker.admit(worker.prompt(TOKENS)) for worker in workers]
        steps = [worker.agent.open_step([run.request()]) for worker, run in zip(workers, runs, strict=True)]
        for worker, run, step in zip(workers, runs, steps, strict=True):
            assert worker.forward(step, [run]) == 0
        for step in steps:
            step.close()
        for worker, run in zip(workers, runs, strict=True):
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            assert worker.agent.poll().saved
        assert calls.of(SAVE)
        assert_within(calls, limits)


def assert_within(calls: Calls, limits: dict[str, int]) -> None:
    assert calls.most_blocks <= limits["max_transfer_blocks"]
    assert calls.most_bytes <= limits["max_transfer_bytes"]
    assert calls.most_inflight <= calls.most_granted <= limits["max_inflight_bytes"]


def keeps_to(worker: KnownWorker, blocks: int) -> bool:
    return worker.agent._dispatcher.lanes.load.caps.blocks == blocks


def test_what_one_call_may_copy_follows_the_settings() -> None:
    with serving() as (server, [worker]):
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        for blocks in (4096, 60):
            transfer = TransferSettings(max_transfer_blocks=blocks, step_timeout_ms=60_000)
            server.call(server.server.apply, server.server.settings.model_copy(update={"transfer": transfer}))
            assert eventually(functools.partial(keeps_to, worker, blocks))
            with recorded() as calls:
                loaded(worker, worker.admit(chain), WAITS["all at once"])
            assert calls.most_blocks <= blocks
            assert blocks > 60 or len(calls.calls) >= LAYERS


def test_loads_that_wait_at_their_gate_hold_up_no_other_step_of_the_agent() -> None:
    with serving(prefetch_layers=1) as (_, [worker]):
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        first, second = worker.admit(chain), worker.admit(chain)
        waiting = step_of(worker.agent.open_step([first.request(save=False)]))
        loaded(worker, second, WAITS["all at once"])
        assert waiting.loading and not waiting.is_ready(LAYERS - 1)
        with waiting:
            assert waiting.wait_all()
        assert worker.agent.wait_idle(first.name, PATIENCE_S)


def test_loads_that_wait_at_their_gate_hold_up_no_other_session() -> None:
    """Each of three engines that stand still has been granted all it may be."""
    limits = {"max_transfer_bytes": 8 << 10, "max_inflight_bytes": 64 << 10}
    with serving(4, prefetch_layers=1, **limits) as (_, workers):
        chains = [worker.prompt(TOKENS) for worker in workers]
        for worker, chain in zip(workers, chains, strict=True):
            worker.serve(chain)
        still = [
            step_of(worker.agent.open_step([worker.admit(chain).request(save=False)]))
            for worker, chain in list(zip(workers, chains, strict=True))[1:]
        ]
        loaded(workers[0], workers[0].admit(chains[0]), WAITS["layer by layer"])
        for step in still:
            assert step.loading
            with step:
                assert step.wait_all()


def test_loads_that_wait_at_their_gate_end_with_their_step() -> None:
    with serving(prefetch_layers=1) as (_, [worker]):
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        run = worker.admit(chain)
        step = step_of(worker.agent.open_step([run.request(save=False)]))
        assert step.wait_layer(0)
        step.fence("the engine gave up")
        step.close(ok=False)
        assert worker.agent.wait_idle(run.name, PATIENCE_S)


def test_a_small_window_costs_no_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step is granted in two messages; what has ended is told after the first, and at the end."""
    monkeypatch.setattr(load_lane, "REPORT_S", 1e9)
    with serving(prefetch_layers=1) as (_, [worker]):
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        run = worker.admit(chain)
        heard: list[ToClient] = []
        told: list[None] = []
        dispatcher = worker.agent._dispatcher
        lanes = dispatcher.lanes
        monkeypatch.setattr(
            dispatcher,
            "message_received",
            lambda message: (heard.append(message), Dispatcher.message_received(dispatcher, message)),
        )
        monkeypatch.setattr(lanes.load, "_on_reported", lambda: (told.append(None), lanes._loaded_some()))
        with recorded() as calls:
            loaded(worker, run, WAITS["layer by layer"])
        assert len(calls.of(LOAD)) >= LAYERS // 2, "each layer, or two, is a call of its own"
        assert len(told) <= 3
        assert sum(isinstance(message, Grant) for message in heard) <= 2

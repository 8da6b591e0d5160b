"""Abort while batches are in flight: released only after the last touch, and nobody else is hurt."""

from __future__ import annotations

import pytest
from e2e.holding import hold_loads
from e2e.known import AFTER, POISON, eventually, small_spec, step_of

from server.support import Embed, observe, worker_on

LAYERS, TOKENS = 6, 256


@pytest.mark.parametrize("ready_layers", [0, 1, 3])
def test_a_loading_request_is_aborted(embed: Embed, monkeypatch: pytest.MonkeyPatch, ready_layers: int) -> None:
    # A layer of both requests is 32 KiB: 16 ms on this link; batches of 8 KiB carry blocks of both.
    server = embed(pool__link_gbps=0.002, transfer={"max_transfer_bytes": "8KiB", "max_inflight_bytes": "64KiB"})
    with worker_on(server, spec=small_spec(LAYERS)) as worker:
        chains = [worker.prompt(TOKENS), worker.prompt(TOKENS)]
        for chain in chains:
            worker.serve(chain)
        gone, kept = (worker.admit(chain) for chain in chains)
        go_on = hold_loads(monkeypatch, ready_layers)
        step = step_of(worker.agent.open_step([gone.request(), kept.request()], 60))
        for layer in range(ready_layers):
            assert step.wait_layer(layer).ready
        worker.agent.abort(gone.name)
        assert worker.agent.busy(gone.name)
        go_on.set()
        released: list[str] = []

        def is_released() -> bool:
            released.extend(worker.agent.poll().released)
            return bool(released)

        assert eventually(is_released, every_s=0.0005)
        # Reported free: from now on nothing may touch its blocks, whatever the step still does.
        blocks = range(len(gone.tables[0]))
        untouched = [worker.changed_bytes(gone, layer, blocks, POISON) == 0 for layer in range(LAYERS)]
        for layer in range(LAYERS):
            worker.fill(gone, layer, blocks, AFTER)
        for layer in range(LAYERS):
            outcome = step.wait_layer(layer)
            assert outcome.ready, outcome
            assert worker.wrong_bytes(kept, layer, 0, kept.hit.tokens) == 0
            worker.compute(kept, layer, kept.hit.tokens, TOKENS)
            step.layer_done(layer)
        step.close()
        assert worker.agent.wait_idle(kept.name, 10)
        for layer in range(LAYERS):
            assert worker.changed_bytes(gone, layer, blocks, AFTER) == 0, f"layer {layer} was written after the release"
        assert any(untouched), "its loads had all ended before the abort: the test has tested nothing"
        assert released == [gone.name]
        assert worker.serve(chains[0]).hit.tokens == TOKENS - 1


def test_every_request_of_a_step_is_aborted(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embed(pool__link_gbps=0.001, transfer={"max_transfer_bytes": "4KiB", "max_inflight_bytes": "16KiB"})
    with worker_on(server, spec=small_spec(LAYERS)) as worker:
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        run = worker.admit(chain)
        go_on = hold_loads(monkeypatch, 0)
        step = step_of(worker.agent.open_step([run.request()], 60))
        worker.agent.abort(run.name)
        go_on.set()
        outcome = step.wait_layer(LAYERS - 1)
        assert outcome.aborted and not outcome.failed and not outcome.ready
        step.close(False)
        assert eventually(lambda: run.name in worker.agent.poll().released)
        assert worker.agent.wait_idle(run.name, 10)


def test_a_saving_request_is_aborted(embed: Embed) -> None:
    """What it has not stored is never found; its room comes back; the other request's chunks are published."""
    server = embed(pool__link_gbps=0.002, transfer={"max_transfer_bytes": "4KiB"})
    control = observe(server)
    with worker_on(server, spec=small_spec(LAYERS)) as worker:
        gone, kept = worker.admit(worker.prompt(TOKENS)), worker.admit(worker.prompt(TOKENS))
        with worker.agent.open_step([gone.request(), kept.request()]) as step:
            for layer in range(LAYERS):
                for run in (gone, kept):
                    worker.compute(run, layer, 0, TOKENS)
                step.layer_done(layer)
                if layer == 2:
                    worker.agent.abort(gone.name)
        assert eventually(lambda: gone.name in worker.agent.poll().released)
        for layer in range(LAYERS):
            worker.fill(gone, layer, range(len(gone.tables[0])), AFTER)
        assert worker.agent.wait_idle(kept.name, 20)
        assert control.status()["pool"]["half_written"] == 0
        assert worker.agent.lookup("gone", gone.chain).tokens == 0
        assert worker.serve(kept.chain).hit.tokens == TOKENS - 1
    control.close()


def test_aborts_without_a_step(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        worker.agent.abort("never-seen")
        assert worker.agent.poll().released == ("never-seen",)
        assert worker.agent.poll().released == ()

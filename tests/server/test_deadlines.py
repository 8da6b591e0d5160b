"""Deadlines are absolute per step: layers that never come cost one deadline, not one each."""

from __future__ import annotations

import time

from e2e.known import AFTER, eventually, small_spec, step_of

from layerflow.agent import LoadResult
from server.support import Embed, observe, worker_on

LAYERS = 24
STALLED = {"max_transfer_bytes": "4KiB", "max_inflight_bytes": "8KiB"}


def test_24_layers_cost_one_deadline(embed: Embed) -> None:
    server = embed(pool__link_gbps=0.2, transfer=STALLED)
    control = observe(server)
    with worker_on(server, spec=small_spec(LAYERS)) as worker:
        chain = worker.prompt(128)
        worker.serve(chain)
        run = worker.admit(chain)
        # 8 KiB a layer: at this speed the first batch alone takes 40 s.
        server.call(_crawl, server)
        assert eventually(lambda: worker.agent.terms is not None and worker.agent.terms.link_gbps < 0.001)
        step = step_of(worker.agent.open_step([run.request()], 0.25))
        outcomes: list[LoadResult] = []
        took: list[float] = []
        for layer in range(LAYERS):
            began = time.monotonic()
            outcomes.append(step.wait_layer(layer))
            took.append(time.monotonic() - began)
            step.layer_done(layer)
        assert not any(outcomes)
        assert worker.agent.statistics().fenced_steps == 1
        assert {failed.blocks for outcome in outcomes for failed in outcome.failed} == {tuple(range(32))}
        # Of most, not of all: a thread may stand still in any of them.
        assert sorted(took)[LAYERS // 2] < 0.25 / 2, "the layers have waited one after the other"
        for layer in range(LAYERS):
            worker.fill(run, layer, range(32), AFTER)
        step.close(False)
        assert worker.agent.wait_idle(run.name, 10)
        assert sum(worker.changed_bytes(run, layer, range(32), AFTER) for layer in range(LAYERS)) == 0
        assert control.status()["flow"]["load_inflight_bytes"] == 0
        # The engine computed it anyway, from a load that failed: none of that may be found.
        assert worker.agent.lookup("again", chain).tokens == 127
    control.close()


def _crawl(server: object) -> None:
    running = server.server  # type: ignore[attr-defined]
    slow = running.settings.pool.model_copy(update={"link_gbps": 1e-7})
    running.settings = running.settings.model_copy(update={"pool": slow})
    transfer = running.settings.transfer.model_copy(update={"step_timeout_ms": 4999})
    running.apply(running.settings.model_copy(update={"transfer": transfer}))


def test_a_deadline_that_has_passed(embed: Embed) -> None:
    with worker_on(embed(), spec=small_spec(2)) as worker:
        chain = worker.prompt(64)
        worker.serve(chain)
        run = worker.admit(chain)
        step = step_of(worker.agent.open_step([run.request(save=False)], 0.0))
        outcome = step.wait_all()
        if not outcome:  # the lane may have been quicker: then every byte is in place
            assert {failed.request for failed in outcome.failed} == {run.name}
        else:
            assert sum(worker.wrong_bytes(run, layer, 0, 63) for layer in range(2)) == 0
        step.close()
        assert worker.agent.wait_idle(run.name, 10)


def test_saves_that_are_never_computed_are_dropped_at_their_deadline(embed: Embed) -> None:
    server = embed(transfer={"save_timeout_ms": 150})
    control = observe(server)
    with worker_on(server, spec=small_spec(2)) as worker:
        run = worker.admit(worker.prompt(64))
        step = step_of(worker.agent.open_step([run.request()], 0.05))
        step.layer_done(0)  # and the engine hangs: neither layer 1 nor the end of the step ever comes
        assert worker.agent.wait_idle(run.name, 10)
        assert eventually(lambda: control.status()["pool"]["half_written"] == 0)
        assert worker.agent.lookup("look", run.chain).tokens == 0
        step.close(False)
    control.close()

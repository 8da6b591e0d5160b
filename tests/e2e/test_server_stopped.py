"""A server that is stopped (SIGSTOP) in mid-load and goes on later: nobody writes behind the engine's back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.holding import hold_loads
from e2e.known import AFTER, KnownWorker, eventually, small_spec, step_of
from e2e.rounds import rounds
from e2e.stopping import stop
from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

LAYERS = 8
LEASE_MS = 2500
STOPPED_LEASES = 1.5
"""So many times the length of a lease the server is stopped."""
PATIENCE_S = 30.0


@pytest.fixture
def stopped() -> Iterator[Callable[[ServerProcess], None]]:
    servers: list[ServerProcess] = []

    def stopped(server: ServerProcess) -> None:
        servers.append(server)
        stop(server.process.pid)

    yield stopped
    for server in servers:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("stopped_s", [1.2, pytest.param(10.0, marks=[pytest.mark.campaign, pytest.mark.timeout(300)])])
def test_no_block_changes_after_its_wait_has_failed(
    serve: Callable[..., ServerProcess],
    stopped: Callable[[ServerProcess], None],
    stopped_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve(
        server__liveness_ms=2000,
        pool__link_gbps=0.004,
        transfer__step_timeout_ms=5000,
        transfer__max_transfer_bytes="8KiB",
        transfer__max_inflight_bytes="32KiB",
    )
    with KnownWorker(server.endpoint, small_spec(LAYERS)) as worker:
        chain = worker.prompt(512)
        worker.serve(chain)
        run = worker.admit(chain, planned=False)
        assert run.hit.tokens == 511
        go_on = hold_loads(monkeypatch, 2)  # the next layer is on its way when the server stands still
        step = step_of(worker.agent.open_step([run.request()]))
        for layer in range(2):
            assert step.wait_layer(layer).ready
            assert worker.wrong_bytes(run, layer, 0, run.hit.tokens) == 0
        stopped(server)
        go_on.set()
        outcome = step.wait_layer(LAYERS - 1)
        assert not outcome.ready
        assert all("deadline" in failed.reason for failed in outcome.failed), outcome
        assert worker.agent.attached, "a stopped server is not a lost one"
        assert worker.agent.statistics().fenced_steps == 1
        worker.note([run], outcome)
        blocks = run.failed[0]
        for layer in range(LAYERS):
            worker.fill(run, layer, sorted(blocks), AFTER)
        step.close(False)

        def changed() -> int:
            return sum(worker.changed_bytes(run, layer, blocks, AFTER) for layer in range(LAYERS))

        assert not eventually(changed, stopped_s, 0.01), "a block changed while the server was stopped"
        # Work that begins while it is stopped fails by its own deadline and touches nothing either.
        assert worker.agent.lookup("while-stopped", chain).tokens == 0
        os.kill(server.process.pid, signal.SIGCONT)
        assert worker.agent.wait_idle(run.name, PATIENCE_S), "the step did not end once the server went on"
        assert not eventually(changed, 0.3, 0.01), "a block changed after the server went on"
        worker.retire(run)
        assert eventually(lambda: worker.agent.lookup("again", chain).tokens == 511, every_s=0.05)
        again = worker.serve(chain)
        assert again.hit.tokens == 511
        assert worker.agent.statistics().attachments == 1


@rounds(2, 20)
def test_loads_and_saves_outlast_a_stop_longer_than_their_leases(
    serve: Callable[..., ServerProcess], stopped: Callable[[ServerProcess], None], rounds: int
) -> None:
    """Leases are shorter than the stop; the loads and saves sent meanwhile are carried out all the same."""
    server = serve(pool__lease_ms=LEASE_MS)
    with KnownWorker(server.endpoint, small_spec(LAYERS), lookup_timeout_s=PATIENCE_S) as worker:
        chain = worker.prompt(512)
        worker.serve(chain)
        idle = fetch_status(server.endpoint)["flow"]["steps"]
        for _ in range(rounds):
            saving, loading = worker.admit(worker.prompt(256)), worker.admit(chain)
            assert loading.hit.tokens == 511
            stopped(server)
            step = step_of(worker.agent.open_step([loading.request(), saving.request()], PATIENCE_S))
            sent = time.monotonic()
            assert eventually(lambda sent=sent: time.monotonic() > sent + STOPPED_LEASES * LEASE_MS / 1e3)
            os.kill(server.process.pid, signal.SIGCONT)
            with step:
                assert worker.forward(step, [loading, saving]) == 0, "wrong bytes"
            assert not loading.failed, loading.failed
            for run in (loading, saving):
                assert worker.agent.wait_idle(run.name, PATIENCE_S), "a session is frozen"
            assert worker.serve(saving.chain).hit.tokens == 255, "what was saved is not found"
            worker.retire(loading)
            worker.retire(saving)
            assert worker.agent.attached

        def at_rest() -> bool:
            status = fetch_status(server.endpoint)
            pool, flow = status["pool"], status["flow"]
            return (flow["steps"], pool["half_written"], pool["pinned"]) == (idle, 0, 0)

        assert eventually(at_rest, PATIENCE_S), fetch_status(server.endpoint)
        assert worker.agent.statistics().attachments == 1


@rounds(2, 20)
def test_a_hit_outlasts_a_stop_although_its_room_is_wanted(
    serve: Callable[..., ServerProcess], stopped: Callable[[ServerProcess], None], rounds: int
) -> None:
    """Behind the stop the first message to be read asks for all of the arena; the second loads what was leased before.

    A server that let leases run out at once would give the hit's room away between the two.
    """
    server = serve(pool__lease_ms=LEASE_MS, pool__lease_share=1.0, pool__size="512KiB")
    with KnownWorker(server.endpoint, small_spec(LAYERS), 512, lookup_timeout_s=PATIENCE_S) as worker:
        chain = worker.prompt(512)
        worker.serve(chain)
        for _ in range(rounds):
            pressing, loading = worker.admit(worker.prompt(1024)), worker.admit(chain)
            assert loading.hit.tokens == 511
            stopped(server)
            first = step_of(worker.agent.open_step([pressing.request()], PATIENCE_S))
            second = step_of(worker.agent.open_step([loading.request()], PATIENCE_S))
            sent = time.monotonic()
            assert eventually(lambda sent=sent: time.monotonic() > sent + STOPPED_LEASES * LEASE_MS / 1e3)
            os.kill(server.process.pid, signal.SIGCONT)
            with first:
                assert worker.forward(first, [pressing]) == 0
            with second:
                assert worker.forward(second, [loading]) == 0, "wrong bytes"
            assert not loading.failed, "the leased objects were pushed out"
            for run in (loading, pressing):
                assert worker.agent.wait_idle(run.name, PATIENCE_S), "a session is frozen"
                worker.retire(run)

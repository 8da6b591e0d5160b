"""The server dies, stops or starts anew between a hit's answer, which brings the places, and the end of its load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from e2e.fault import SLOW_LINK, Fault
from e2e.known import KnownWorker, eventually, small_spec, step_of
from e2e.rounds import record, rounds
from e2e.stopping import stop
from layerflow.agent import link
from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

STEP_TIMEOUT_S = 30.0
PROMPT = 512
LAYERS = 8
LOAD_S = 0.07


def killed(server: ServerProcess) -> None:
    server.kill()


def restarted(server: ServerProcess) -> None:
    server.kill()
    server.restart()


def stopped(server: ServerProcess) -> None:
    stop(server.process.pid)
    try:
        threading.Event().wait(LOAD_S / 2)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("fault", [killed, stopped, restarted])
@rounds(6, 100)
def test_a_planned_load_outlives_its_server(
    serve: Callable[..., ServerProcess],
    fault: Callable[[ServerProcess], None],
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "DYING_S", 20.0)  # a process that was killed hangs up a moment before it has ended
    server = serve(**SLOW_LINK)
    random = np.random.default_rng(5)
    failed = wrong = during = 0
    with KnownWorker(server.endpoint, small_spec(LAYERS, row=32), lookup_timeout_s=5) as worker:
        for _ in range(rounds):
            assert worker.agent.wait_attached(20), "the engine's agent did not attach again"
            chain = worker.prompt(PROMPT)
            worker.serve(chain)
            run = worker.admit(chain)
            assert run.hit.tokens == PROMPT - 1 and run.hit.plan is not None
            hitting = Fault(lambda: fault(server), random.uniform(0, 1.2 * LOAD_S))
            hitting.go()
            if random.random() < 0.3:  # the server may be gone before the step is opened
                assert eventually(lambda hitting=hitting: hitting.at > 0)
            step = step_of(worker.agent.open_step([run.request()], STEP_TIMEOUT_S))
            wrong += worker.forward(step, [run])
            step.close()
            ended = time.monotonic()
            hitting.join()
            during += hitting.at < ended
            failed += bool(run.failed)
            assert worker.agent.wait_idle(run.name, 30), "the step never ended"
            worker.retire(run)
            if fault is killed:
                server.restart()
        assert worker.agent.wait_attached(20)
        worker.serve(worker.prompt(PROMPT))

        def at_rest() -> bool:
            pool = fetch_status(server.endpoint)["pool"]
            return (pool["pinned"], pool["half_written"]) == (0, 0)

        assert eventually(at_rest, 20), fetch_status(server.endpoint)["pool"]
    record(f"plan_{fault.__name__}", rounds=rounds, failed=failed, wrong=wrong, during=during)
    assert wrong == 0
    assert failed == 0, "a resident load failed with its server"
    assert during, "no fault hit a load: the test has tested nothing"

"""kill -9 of the server in the middle of steps: waits fail at once, no wrong byte, nothing leaks, and it comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from e2e.fault import SLOW_LINK, Fault
from e2e.known import AFTER, KnownWorker, eventually, layerflow_threads, open_fds, shared_memory, small_spec, step_of
from e2e.rounds import record, rounds
from layerflow_cli.bench.harness import ServerProcess

STEP_TIMEOUT_S = 30.0
PROMPT = 512
LAYERS = 8
MOST = 4


@rounds(6, 50)
def test_a_killed_server_fails_the_waits_and_nothing_else(serve: Callable[..., ServerProcess], rounds: int) -> None:
    server = serve(**SLOW_LINK)
    random = np.random.default_rng(5)
    shared: set[Path] = set()
    noticed_ms: list[float] = []
    failed_in_flight = wrong = changed = 0
    with KnownWorker(server.endpoint, small_spec(LAYERS, row=32)) as worker:
        baseline = None
        kills = 0
        # More often where none has met a load: they may all come late.
        while kills < rounds or (not failed_in_flight and kills < MOST * rounds):
            kills += 1
            assert worker.agent.wait_attached(20), "the engine's agent did not attach again"
            chain = worker.prompt(PROMPT)
            worker.serve(chain)
            killer = Fault(server.kill, random.uniform(0, 0.09))
            run = worker.admit(chain, planned=False)
            assert run.hit.tokens == PROMPT - 1
            ends: list[float] = []
            shared |= shared_memory(server.process.pid)
            step = step_of(worker.agent.open_step([run.request()], STEP_TIMEOUT_S))
            killer.go()
            for layer in range(LAYERS):
                outcome = step.wait_layer(layer)
                if outcome.failed:
                    ends.append(time.monotonic())
                    worker.note([run], outcome)
                    # Not the deadline: the wait ended because the server is gone.
                    assert {failed.reason for failed in outcome.failed} == {"the server is gone"}
                    break
                wrong += worker.wrong_bytes(run, layer, 0, run.hit.tokens)
                worker.compute(run, layer, run.hit.tokens, PROMPT)
                step.layer_done(layer)
            for group, blocks in run.failed.items():
                for layer in worker.spec.groups[group].layers:
                    worker.fill(run, layer, sorted(blocks), AFTER)
            step.close(False)
            killer.join()
            if ends:
                failed_in_flight += 1
                noticed_ms.append((ends[0] - killer.at) * 1e3)
            assert eventually(lambda: not worker.agent.attached)
            # While nobody is there: a miss at once, and a step that only says that its loads have failed.
            assert worker.agent.lookup("nobody", chain).tokens == 0
            assert worker.agent.wait_idle(run.name, 30)
            server.restart()
            assert worker.agent.wait_attached(20)
            for group, blocks in run.failed.items():
                for layer in worker.spec.groups[group].layers:
                    changed += worker.changed_bytes(run, layer, blocks, AFTER)
            worker.retire(run)
            if kills == 1:
                worker.serve(worker.prompt(PROMPT))
                baseline = (Counter(layerflow_threads()), open_fds())
        worker.serve(worker.prompt(PROMPT))
        assert baseline is not None
        threads, fds = baseline
        # What earlier tests have left may end meanwhile.
        assert eventually(lambda: not Counter(layerflow_threads()) - threads), (layerflow_threads(), threads)
        assert eventually(lambda: not open_fds() - fds), f"{open_fds()} where there were {fds}"
        assert worker.agent.statistics().attachments == kills + 1
    record("server_killed", rounds=kills, failed_in_flight=failed_in_flight, noticed_ms=sorted(noticed_ms), wrong=wrong)
    assert wrong == 0
    assert changed == 0, "a block was written after its load was reported failed"
    assert failed_in_flight, "no kill hit a step: the test has tested nothing"
    assert not [path for path in shared if path.exists()]

"""kill -9 of an engine in the middle of its saves: what it held comes back, and nothing half-written is ever found."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from e2e.children import Child, save_for_ever, tokens_of
from e2e.known import KnownWorker, eventually, small_spec
from e2e.rounds import record, rounds
from layerflow.agent import Control
from layerflow_cli.bench.harness import ServerProcess

LAYERS, TOKENS = 6, 200
COMMON = 999


@rounds(6, 50)
def test_a_killed_engine_leaves_nothing_behind(serve: Callable[..., ServerProcess], rounds: int) -> None:
    # 6 layers of 12.5 KiB over 3 MB/s: a step's saves are under way for 25 ms, and one follows the other.
    server = serve(pool__link_gbps=0.003, pool__lease_ms=300, transfer__max_transfer_bytes="4KiB", pool__size="32MiB")
    control = Control(server.endpoint, "observer")
    random = np.random.default_rng(3)
    never = threading.Event()
    half_written_at_kill = hits = misses = 0
    with KnownWorker(server.endpoint, small_spec(LAYERS)) as reader:
        reader.serve(reader.agent.chain(tokens_of(COMMON, TOKENS)))
        for number in range(rounds):
            first = 1000 * (number + 1)
            child = Child(save_for_ever, server.endpoint, LAYERS, TOKENS, first, COMMON)
            assert [child.hear(), child.hear()] == [first, first + 1]  # so the first prompt is stored
            never.wait(random.uniform(0, 0.12))  # the random moment
            half_written_at_kill += control.status()["pool"]["half_written"] > 0
            last = [first + 1, *child.kill()][-1]  # what it was at, or had ended

            def quiet() -> bool:
                status = control.status()
                workers = [session for session in status["sessions"] if session["memory"]]
                return (
                    len(workers) == 1
                    and status["pool"]["half_written"] == 0
                    and status["pool"]["pinned"] == 0
                    and status["flow"]["steps"] == 0
                    and status["flow"]["save_inflight_bytes"] == status["flow"]["load_inflight_bytes"] == 0
                    and status["flow"]["unsaved_bytes"] == 0
                )

            assert eventually(quiet, every_s=0.02), control.status()
            for seed in range(first, last + 1):
                chain = reader.agent.chain(tokens_of(seed, TOKENS))
                hit = reader.agent.lookup("look", chain).tokens
                assert hit in (0, TOKENS - 1)
                assert hit or seed > first, "an object of the killed engine, published before, is gone"
                hits, misses = hits + (hit > 0), misses + (hit == 0)
                if hit:
                    reader.serve(chain)
        status = control.status()
    control.close()
    record("engine_killed", rounds=rounds, half_written_at_kill=half_written_at_kill, hits=hits, misses=misses)
    assert half_written_at_kill, "no kill hit a save: the test has tested nothing"
    assert misses, "every save had ended before its kill"
    assert status["flow"]["sessions_lost"] == rounds

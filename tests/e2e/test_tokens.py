"""A real (small) model: whatever happens to the server, the tokens are those of an engine on its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from e2e.known import PATIENCE_S, eventually
from e2e.rounds import record, rounds
from layerflow.agent import Agent
from layerflow_cli.bench.harness import ServerProcess
from layerflow_engine import Engine
from layerflow_engine.config import TINY_GQA, TINY_HYBRID, TINY_MLA, EngineConfig
from layerflow_engine.glue import attach
from layerflow_engine.texts import passage

CHUNK = 64
PATIENT = {"lookup_timeout_s": PATIENCE_S, "wait_s": PATIENCE_S}
# A prompt's KV takes some 100 ms, so that a kill finds it on its way; the policy would rather recompute it.
SLOW = {
    "pool.link_gbps": 0.002,
    "transfer.mode": "layerwise",
    "transfer.max_transfer_bytes": "4KiB",
    "transfer.max_inflight_bytes": "16KiB",
}


@rounds(3, 30)
def test_a_killed_server_changes_no_token(serve: Callable[..., ServerProcess], rounds: int) -> None:
    server = serve(**SLOW)
    random = np.random.default_rng(23)
    never = threading.Event()
    prompts = [passage(300), passage(220, 4000)]
    configs: list[EngineConfig] = [TINY_GQA, TINY_MLA, TINY_HYBRID]
    fenced = met = 0
    for number, config in zip(range(rounds), itertools.cycle(configs), strict=False):
        alone = [result.tokens for result in Engine(config).generate(prompts, 8)]
        engine = Engine(config)
        connection = attach(engine, server.endpoint, f"engine-{number}", chunk_tokens=CHUNK, **PATIENT)
        assert [result.tokens for result in engine.generate(prompts, 8)] == alone
        engine.drain()

        def kill(delay_s: float = random.uniform(0, 0.05), agent: Agent = connection.agent) -> None:
            nonlocal met
            eventually(lambda: agent.statistics().open_steps, every_s=0.0005)
            never.wait(delay_s)  # the random moment
            met += agent.statistics().open_steps > 0
            server.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        during = engine.generate(prompts, 8)
        killer.join()
        assert [result.tokens for result in during] == alone, f"round {number}: the kill has changed tokens"
        without = engine.generate(prompts, 8)
        assert [result.tokens for result in without] == alone
        engine.drain()
        fenced += connection.agent.statistics().fenced_steps
        server.restart()
        assert connection.agent.wait_attached(20), "the engine was not attached again"
        for expected in (False, True):
            results = engine.generate(prompts, 8)
            assert [result.tokens for result in results] == alone
            assert [result.cached_tokens > 0 for result in results] == [expected] * 2
            engine.drain()
        connection.close()
    assert met, "no kill met an open step: the test has tested nothing"
    record("tokens_server_killed", rounds=rounds, met_steps=met, fenced_steps=fenced)


@pytest.mark.parametrize("config", [TINY_GQA, TINY_MLA, TINY_HYBRID], ids=lambda config: config.name)
def test_deadlines_change_no_token(serve: Callable[..., ServerProcess], config: EngineConfig) -> None:
    """A link on which no prompt's KV arrives in time: it is computed instead, after one deadline."""
    server = serve(**SLOW, transfer__step_timeout_ms=15)
    prompts = [passage(300)]
    alone = [result.tokens for result in Engine(config).generate(prompts, 8)]
    engine = Engine(config)
    connection = attach(engine, server.endpoint, "late", chunk_tokens=CHUNK, **PATIENT)
    for _ in range(3):
        assert [result.tokens for result in engine.generate(prompts, 8)] == alone
        engine.drain()
    assert connection.agent.statistics().hit_tokens > 0
    assert connection.agent.statistics().fenced_steps > 0
    connection.close()

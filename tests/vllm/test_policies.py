"""``kv_load_failure_policy``: what becomes of a request whose load really fails, and of the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import Engine, connector, loads_groups
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
# A hit of 300 tokens needs some 0.3 s over this link, and must be there after 50 ms: it fails at the deadline, always.
LATE = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "64KiB", "transfer__step_timeout_ms": 50}
WAYS = [("llama", "layerwise"), ("llama", "bulk"), pytest.param(("gemma3", "layerwise"), marks=loads_groups)]

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


@pytest.fixture(params=WAYS, ids=["in the step", "in the background", "several groups"])
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Model and mode."""
    return request.param


def hit_that_fails(engine: Engine, server: ServerProcess, asked: list[int]) -> Answer:
    """Store a prompt, and ask for it again."""
    assert engine.one(asked, max_tokens=MAX_TOKENS).cached == 0
    settled(server.endpoint)
    assert "load_failed" not in engine.output()
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    assert "load_failed" in engine.output()
    return answer


def assert_serves(engine: Engine, server: ServerProcess, plain: Engine) -> None:
    """The next prompt is nobody else's, and its blocks come back."""
    other = prompt(2, 130)
    wanted = plain.one(other, max_tokens=MAX_TOKENS)
    answer = engine.one(other, max_tokens=MAX_TOKENS)
    assert (answer.tokens, answer.reason) == (wanted.tokens, "length")
    engine.assert_no_block_lost()
    settled(server.endpoint)


def test_recompute(way: tuple[str, str], serve: Serve, vllm: Start, plain: Start) -> None:
    model, mode = way
    server = serve(**LATE)
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode=mode, chunk_tokens=CHUNK))
    asked = prompt(1, 300)
    answer = hit_that_fails(engine, server, asked)
    assert (answer.tokens, answer.reason) == (plain(model).one(asked, max_tokens=MAX_TOKENS).tokens, "length")
    assert_serves(engine, server, plain(model))


def test_fail(way: tuple[str, str], serve: Serve, vllm: Start, plain: Start) -> None:
    model, mode = way
    server = serve(**LATE)
    config = connector(server.endpoint, policy="fail", mode=mode, chunk_tokens=CHUNK)
    engine = vllm(model, kv_transfer_config=config)
    answer = hit_that_fails(engine, server, prompt(1, 300))
    assert (answer.tokens, answer.reason) == ((), "error")
    assert_serves(engine, server, plain(model))

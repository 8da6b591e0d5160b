"""Asynchronous scheduling, forced on the CPU: the step behind a failed load is under way before vLLM hears of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparison import MAX_TOKENS, Comparison, prompt, settled
from engines import Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
# Loads are still under way when their step asks for its first layer: cutting them off there always fails them.
SLOW = {"pool__link_gbps": 0.01, "transfer__max_transfer_bytes": "64KiB"}
PIECES = {"max_num_batched_tokens": 128, "max_num_seqs": 16}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


@pytest.mark.timeout(300)
def test_tokens_and_hits(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config, ahead=True, **PIECES)
    assert engine.facts["steps_in_flight"] == 2
    both = Comparison(plain("llama", **PIECES), engine, server.endpoint, CHUNK)
    first = prompt(1, 600)
    both.serve(first)
    both.serve(first)
    both.serve(first[:300] + prompt(2, 50))
    both.serve(prompt(4, 400), first[:500], prompt(5, 70))
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_nothing_that_is_computed_behind_a_failed_load_is_ever_found(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve(**SLOW)
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config, ahead=True, **PIECES)
    head = prompt(1, 4 * CHUNK)
    engine.one(head)
    settled(server.endpoint)
    asked = head + prompt(2, 300)  # three steps of 128 tokens: the first loads, the second is scheduled meanwhile
    wanted = plain("llama", **PIECES).one(asked, max_tokens=MAX_TOKENS).tokens
    engine.break_loads(1)
    assert engine.one(asked, max_tokens=MAX_TOKENS).tokens == wanted, "of the step behind the failed one too"
    engine.break_loads(0)
    assert "step_loads_taken_back" in engine.output()
    settled(server.endpoint)
    for _ in range(2):
        answer = engine.one(asked, max_tokens=MAX_TOKENS)
        assert answer.cached >= len(head)
        assert answer.tokens == wanted
        settled(server.endpoint)
    engine.assert_no_block_lost()

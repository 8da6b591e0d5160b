"""Models of several cache groups, loaded layer by layer inside the step; and what happens when such a load fails.

vLLM cannot be told that it has: layerflow takes back what was computed on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from churn import Churn
from comparison import MAX_TOKENS, Comparison, loading, prompt, settled, until
from e2e.stopping import go_on, stop
from engines import Engine, connector, loads_groups
from test_faults import SLOW

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
HYBRID = ["gemma3", "gptoss"]
# Loads are still under way when their step asks for its first layer: cutting them off there always fails them.
CRAWLING = {"pool__link_gbps": 0.01, "transfer__max_transfer_bytes": "64KiB"}
PREFIX_CACHE = {"enable_prefix_caching": True}
PIECES = {"max_num_batched_tokens": 128, "max_num_seqs": 16}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]

pytestmark = loads_groups


def layerwise(server: ServerProcess, **extra: Any) -> dict[str, Any]:
    return connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK, **extra)


def written(server: ServerProcess) -> None:
    """Wait until all that is stored is on the disk."""
    until(server, lambda status: status["tier"]["written_objects"] and not status["tier"]["backlog_bytes"])


def begun_anew(server: ServerProcess, engine: Engine) -> None:
    """The server is back, its arena is empty, and the engine has found it."""
    server.restart()
    engine.one(prompt(99, 20))  # who looks up finds out that the one before is gone
    until(server, lambda status: {session["memory"] for session in status["sessions"]} == {True, False})
    until(server, lambda status: status["tier"]["indexed_objects"] > 0)


@pytest.mark.parametrize(
    ("model", "ahead"),
    [
        ("gemma3", False),
        ("gptoss", True),
        pytest.param("gemma3", True, marks=pytest.mark.campaign),
        pytest.param("gptoss", False, marks=pytest.mark.campaign),
    ],
)
def test_hits_are_loaded_in_the_step(model: str, ahead: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm(model, kv_transfer_config=layerwise(server), ahead=ahead, **PIECES)
    both = Comparison(plain(model, **PIECES), engine, server.endpoint, CHUNK)
    first = prompt(1, 600)
    both.serve(first)
    assert engine.loads() == (0, 0)
    both.serve(first)
    both.serve(first[:300] + prompt(2, 50))
    both.serve(first[:131])
    assert engine.loads() == (3, 0)
    both.serve(prompt(4, 400), first[:500], prompt(5, 70))
    assert engine.loads() == (4, 0)
    engine.assert_no_block_lost()


@pytest.mark.parametrize("model", HYBRID)
def test_what_is_not_in_the_arena_is_loaded_in_the_background(
    model: str, serve: Serve, vllm: Start, plain: Start, tmp_path: Any
) -> None:
    server = serve(pool__disk__path=tmp_path / "pool", pool__disk__capacity="1GiB")
    until(server, lambda status: status["tier"]["up"])
    engine = vllm(model, kv_transfer_config=layerwise(server))
    both = Comparison(plain(model), engine, server.endpoint, CHUNK)
    first = prompt(1, 300)
    both.serve(first)
    both.serve(first)
    assert engine.loads() == (1, 0)
    written(server)
    server.kill()
    begun_anew(server, engine)
    both.serve(first)
    assert engine.loads() == (1, 1)
    both.serve(first)  # what was fetched is in the arena
    assert engine.loads() == (2, 1)


def test_recurrent_state_is_in_place_before_the_pass(serve: Serve, vllm: Start, plain: Start) -> None:
    """The block that the hit ends in, and the one that the step goes on in, which vLLM has filled before."""
    server = serve()
    engine = vllm("qwen3next", kv_transfer_config=connector(server.endpoint, mode="layerwise"))
    single = plain("qwen3next")
    block = engine.facts["block_size"]
    first = prompt(1, 3 * block + 60)
    single.reset()
    single.one(first, max_tokens=MAX_TOKENS)
    wanted = single.one(first, max_tokens=MAX_TOKENS)  # goes on from its own prefix cache
    engine.watch_states()
    engine.one(first, max_tokens=MAX_TOKENS)
    settled(server.endpoint)
    engine.reset()
    answer = engine.one(first, max_tokens=MAX_TOKENS)
    assert (answer.tokens, answer.cached) == (wanted.tokens, wanted.cached) == (wanted.tokens, 3 * block)
    assert engine.loads() == (1, 0)
    saved, loaded, current = engine.watch_states()
    assert saved and loaded == saved
    assert current == saved


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "ahead"),
    [
        ("gemma3", False),
        ("gptoss", True),
        ("qwen3next", True),
        pytest.param("gemma3", True, marks=pytest.mark.campaign),
        pytest.param("gptoss", False, marks=pytest.mark.campaign),
        pytest.param("qwen3next", False, marks=pytest.mark.campaign),
    ],
)
def test_a_load_that_fails_in_the_step_is_taken_back(
    model: str, ahead: bool, serve: Serve, vllm: Start, plain: Start
) -> None:
    """With everybody who shares its blocks through vLLM's own prefix cache, and nobody else."""
    server = serve(**CRAWLING)
    extra = {} if model == "qwen3next" else {"chunk_tokens": CHUNK}
    config = connector(server.endpoint, mode="layerwise", **extra)
    # In bf16 tokens depend on where a prompt is split, and late ones on less.
    size = {"max_num_batched_tokens": 2048 if model == "qwen3next" else 512, "max_num_seqs": 16} | PREFIX_CACHE
    engine = vllm(model, kv_transfer_config=config, ahead=ahead, **size)
    head = prompt(1, 400)
    prompts = [head + prompt(2, 700), head + prompt(3, 30), prompt(4, 90), head + prompt(5, 40)]
    wanted = [plain(model, **size).one(each, max_tokens=MAX_TOKENS).tokens for each in prompts]
    engine.one(head + prompt(6, 10))
    settled(server.endpoint)
    engine.reset()
    engine.break_loads(1)
    answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
    engine.break_loads(0)
    assert "broken by the test" in engine.output()
    assert "step_loads_taken_back" in engine.output()
    assert [answer.tokens for answer in answers] == wanted
    settled(server.endpoint)
    again = engine.generate(*prompts, max_tokens=MAX_TOKENS)  # from what vLLM's own prefix cache has of them
    assert [answer.tokens for answer in again] == wanted
    engine.reset()
    again = engine.generate(*prompts, max_tokens=MAX_TOKENS)  # from what was stored
    assert [answer.tokens for answer in again] == wanted
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "ahead"),
    [("llama", True), ("gemma3", False), pytest.param("gemma3", True, marks=pytest.mark.campaign)],
)
def test_a_promised_load_that_cannot_be_planned_is_taken_back(
    model: str, ahead: bool, serve: Serve, vllm: Start, plain: Start
) -> None:
    """Its blocks are in vLLM's own prefix cache by then, and nobody has filled them."""
    server = serve()
    engine = vllm(model, kv_transfer_config=layerwise(server), ahead=ahead, **PREFIX_CACHE)
    head = prompt(1, 300)
    prompts = [head + prompt(2, 40), head + prompt(3, 30), prompt(4, 90)]
    wanted = [plain(model, **PREFIX_CACHE).one(each, max_tokens=MAX_TOKENS).tokens for each in prompts]
    engine.one(head + prompt(6, 10))
    settled(server.endpoint)
    engine.reset()
    engine.break_plans(1)
    answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
    assert "broken by the test" in engine.output()
    assert "step_loads_taken_back" in engine.output()
    assert [answer.tokens for answer in answers] == wanted
    settled(server.endpoint)
    for _ in range(2):  # from vLLM's own prefix cache, then from what was stored
        again = engine.generate(*prompts, max_tokens=MAX_TOKENS)
        assert [answer.tokens for answer in again] == wanted
        engine.reset()
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_where_vllm_is_to_fail_such_requests_it_fails_those_and_no_others(
    serve: Serve, vllm: Start, plain: Start
) -> None:
    server = serve(**CRAWLING)
    engine = vllm("gemma3", kv_transfer_config=layerwise(server, policy="fail"))
    head, other = prompt(1, 300), prompt(4, 90)
    engine.one(head)
    settled(server.endpoint)
    engine.break_loads(1)
    failed, well = engine.generate(head + prompt(2, 20), other, max_tokens=MAX_TOKENS)
    engine.break_loads(0)
    assert (failed.reason, failed.tokens) == ("error", ())
    assert well.tokens == plain("gemma3").one(other, max_tokens=MAX_TOKENS).tokens
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("gemma3", "killed"),
        ("gemma3", "stopped"),
        ("qwen3next", "killed"),
        pytest.param("qwen3next", "stopped", marks=pytest.mark.campaign),
    ],
)
def test_the_server_goes_while_steps_load(model: str, how: str, serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve(**SLOW, transfer__step_timeout_ms=2000)
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode="layerwise"))
    prompts = [prompt(seed, 350 + 20 * seed) for seed in range(4)]
    wanted = [plain(model).one(each, max_tokens=MAX_TOKENS).tokens for each in prompts]
    for each in prompts:
        engine.one(each)
    settled(server.endpoint)
    engine.reset()
    engine.begin(prompts, MAX_TOKENS)
    until(server, loading)
    if how == "killed":
        server.kill()
    else:
        stop(server.process.pid)
    try:
        answers = engine.finish()
    finally:
        if how == "stopped":
            go_on(server.process.pid)
    assert [answer.tokens for answer in answers] == wanted
    assert engine.loads()[0] > 0
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["gemma3", "qwen3next"])
def test_an_abort_under_a_load_spoils_nobody(model: str, serve: Serve, vllm: Start, plain: Start) -> None:
    """Steps overlap: the request is aborted while its step loads, and another goes on from its blocks."""
    server = serve(**CRAWLING, pool__lease_ms=600_000)
    config = connector(server.endpoint, mode="layerwise")
    engine = vllm(model, kv_transfer_config=config, ahead=True, **PREFIX_CACHE)
    head = prompt(1, 400)
    asked = [head + prompt(2, 40), head + prompt(3, 30)]
    wanted = [plain(model, **PREFIX_CACHE).one(each, max_tokens=MAX_TOKENS).tokens for each in asked]
    engine.one(head + prompt(6, 10))
    settled(server.endpoint)
    engine.reset()
    for aborted_at in (1, 2):
        engine.begin(asked, MAX_TOKENS, {0: aborted_at})
        first, second = engine.finish()
        assert first.reason == "abort"
        assert second.tokens == wanted[1]
        assert engine.one(asked[0], max_tokens=MAX_TOKENS).tokens == wanted[0]  # from vLLM's own cache
        engine.reset()
        settled(server.endpoint)
        until(server, lambda status: status["pool"]["pinned"] == 0)
    assert engine.loads()[0] > 0
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_a_corrupted_object_is_never_loaded(serve: Serve, vllm: Start, plain: Start, tmp_path: Any) -> None:
    """Its checksum is compared when it comes into the arena, so it is found in the background."""
    pool = tmp_path / "pool"
    server = serve(pool__disk__path=pool, pool__disk__capacity="1GiB")
    until(server, lambda status: status["tier"]["up"])
    engine = vllm("gemma3", kv_transfer_config=layerwise(server))
    asked = prompt(1, 300)
    wanted = plain("gemma3").one(asked, max_tokens=MAX_TOKENS).tokens
    engine.one(asked)
    settled(server.endpoint)
    written(server)
    server.kill()
    for file in pool.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                opened.write(random.Random(1).randbytes(64))
    begun_anew(server, engine)
    for _ in range(2):
        assert engine.one(asked, max_tokens=MAX_TOKENS).tokens == wanted
        settled(server.endpoint)
    assert engine.loads() == (1, 1)  # the first failed; the second found what was computed instead
    assert any(name.startswith("fetch_") for name in fetch_status(server.endpoint)["tier"]["failures"])
    engine.assert_no_block_lost()
    until(server, lambda status: status["pool"]["pinned"] == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_loads_fail_under_aborts_and_preemption(ahead: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    """A third of them, in a cache for a few requests that share what vLLM's own prefix cache shows."""
    server = serve(pool__link_gbps=0.05, transfer__max_transfer_bytes="64KiB", pool__lease_ms=600_000)
    small = {"num_gpu_blocks_override": 108, "max_num_seqs": 16, "max_model_len": 1024} | PREFIX_CACHE
    engine = vllm("gemma3", kv_transfer_config=layerwise(server), ahead=ahead, **small)
    churn = Churn(100, 20, shared=range(60, 201), aborted=25, steps=120, seed=7)
    churn.learn(plain("gemma3", **small))
    engine.break_loads(1 / 3)
    for _ in range(2):
        churn.serve(server, engine)
    assert "step_loads_taken_back" in engine.output()
    engine.break_loads(0)
    churn.serve(server, engine, aborting=False)

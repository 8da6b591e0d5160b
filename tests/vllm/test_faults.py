"""Kills, aborts and preemption around a real vLLM: tokens stay right, nothing leaks, and it goes on afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from churn import Churn
from comparison import MAX_TOKENS, RECOVERY_S, kill_amid_loads, prompt, settled, until
from engines import Engine, connector, loads_groups

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
# 4 KiB a token over 4 MB/s: a prompt of 300 tokens takes 0.3 s, and kills hit transfers under way.
SLOW = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "64KiB"}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "mode"),
    [("llama", "layerwise"), ("llama", "bulk"), pytest.param("gemma3", "layerwise", marks=loads_groups)],
)
def test_the_server_is_killed_under_eight_requests(
    model: str, mode: str, serve: Serve, vllm: Start, plain: Start
) -> None:
    server = serve(**SLOW)
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode=mode, chunk_tokens=CHUNK))
    prompts = [prompt(seed, 150 + 20 * seed) for seed in range(8)]
    wanted = [answer.tokens for answer in plain(model).generate(*prompts, max_tokens=MAX_TOKENS)]
    kill_amid_loads(engine, server, prompts, wanted)
    deadline = time.monotonic() + RECOVERY_S
    while (answer := engine.one(prompts[0], max_tokens=MAX_TOKENS)).cached < len(prompts[0]) - 1:
        assert answer.tokens == wanted[0]
        assert time.monotonic() < deadline, "nothing is stored or found since the server came back"
        settled(server.endpoint)
    assert answer.tokens == wanted[0]
    engine.assert_no_block_lost()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3next"])
def test_the_server_is_killed_at_twenty_random_moments(model: str, serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve(**SLOW | {"pool__link_gbps": 0.05})
    extra = {} if model == "qwen3next" else {"chunk_tokens": CHUNK}
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode="layerwise", **extra))
    prompts = [prompt(seed, 150 + 40 * seed) for seed in range(8)]
    wanted = [answer.tokens for answer in plain(model).generate(*prompts, max_tokens=MAX_TOKENS)]
    source, hits = random.Random(5), 0
    for _ in range(20):
        began = time.monotonic()
        first = engine.generate(*prompts, max_tokens=MAX_TOKENS)
        took = time.monotonic() - began
        settled(server.endpoint)
        engine.reset()
        engine.begin(prompts, MAX_TOKENS)
        time.sleep(source.uniform(0, took))  # a random moment of the run
        server.kill()
        answers = engine.finish()
        assert [answer.tokens for answer in first] == wanted
        assert [answer.tokens for answer in answers] == wanted
        engine.assert_no_block_lost()
        hits += sum(answer.cached > 0 for answer in answers)
        server.restart()
        until(server, lambda status: any(session["memory"] for session in status["sessions"]))
    assert hits > 0, "every kill came before the hits: the campaign proves nothing"


@pytest.mark.timeout(300)
def test_vllm_is_killed_while_it_saves(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve(**SLOW)
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    prompts = [prompt(seed, 300) for seed in range(4)]
    wanted = [answer.tokens for answer in plain("llama").generate(*prompts, max_tokens=MAX_TOKENS)]
    for _ in range(3):
        dying = vllm("llama", kv_transfer_config=config)
        dying.begin(prompts, MAX_TOKENS)
        until(server, lambda status: status["pool"]["half_written"] > 0 and status["flow"]["saved_bytes"] > 0)
        dying.kill()
        until(server, lambda status: not status["flow"]["sessions"])
        assert settled(server.endpoint)["pool"]["pinned"] == 0
    engine = vllm("llama", kv_transfer_config=config)
    for _ in range(2):
        answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
        assert [answer.tokens for answer in answers] == wanted
        settled(server.endpoint)
    assert [answer.cached for answer in answers] == [len(each) - 1 for each in prompts]


SMALL = {"max_num_seqs": 16, "max_model_len": 1024}
SMALL_BLOCKS = {"llama": 48, "gemma3": 108, "qwen3next": 28}
"""A cache for a few requests: of one cache group, of three, of one and three of recurrent state."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "mode", "ahead"),
    [
        ("llama", "layerwise", False),
        pytest.param("gemma3", "layerwise", True, marks=loads_groups),
        pytest.param("llama", "bulk", False, marks=pytest.mark.campaign),
        pytest.param("gemma3", "layerwise", False, marks=[loads_groups, pytest.mark.campaign]),
    ],
)
def test_aborts_and_preemption(model: str, mode: str, ahead: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    """200 requests in a cache for a few: many are preempted, some aborted at every stage, none gets a wrong token."""
    server = serve(pool__lease_ms=600_000)  # what is pinned afterwards was forgotten, and does not expire in this test
    small = SMALL | {"num_gpu_blocks_override": SMALL_BLOCKS[model]}
    config = connector(server.endpoint, mode=mode, chunk_tokens=CHUNK)
    engine = vllm(model, kv_transfer_config=config, ahead=ahead, **small)
    churn = Churn(200, 40, shared=range(1, 201), aborted=50, steps=250)
    churn.learn(plain(model, **small))
    for _ in range(2):
        answers = churn.serve(server, engine)
        assert 0 < sum(answer.reason == "abort" for answer in answers) <= len(churn.aborts)
    assert engine.preemptions() > 20
    assert sum(answer.cached for answer in answers) > 0


def recurrent(count: int, rounds: int, ahead: bool, broken: float, serve: Serve, vllm: Start, plain: Start) -> None:
    """Aborts and preemption where hits end at recurrent states, and a share of the loads in the step fails."""
    server = serve(pool__lease_ms=600_000)
    # Prompts are split at boundaries of states alone: where else they are, tokens of bfloat16 depend on it.
    small = SMALL | {"num_gpu_blocks_override": SMALL_BLOCKS["qwen3next"], "max_num_batched_tokens": 2048}
    engine = vllm("qwen3next", kv_transfer_config=connector(server.endpoint, mode="layerwise"), ahead=ahead, **small)
    block = engine.facts["block_size"]
    churn = Churn(count, 20, shared=range(block, 2 * block + 20), aborted=count // 4, steps=2 * count)
    churn.learn(plain("qwen3next", **small), rounds=True)
    engine.break_loads(broken)
    for _ in range(rounds):
        answers = churn.serve(server, engine)
        assert 0 < sum(answer.reason == "abort" for answer in answers) <= len(churn.aborts)
    assert engine.preemptions() > 0
    in_step, behind = engine.loads()
    assert in_step > 0
    assert behind > 0, "where blocks are short, states are loaded in the background"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_aborts_and_preemption_with_recurrent_state(ahead: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    """vLLM counts a block less than it takes for a hit that is loaded in the step, and would end."""
    recurrent(80, 3, ahead, 0.0, serve, vllm, plain)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broken", [0.0, 1 / 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_recurrent_state_under_many_aborts_and_preemptions(
    ahead: bool, broken: float, serve: Serve, vllm: Start, plain: Start
) -> None:
    recurrent(300, 15, ahead, broken, serve, vllm, plain)

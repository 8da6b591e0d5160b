"""Kills, aborts and preemption around a real vLLM: tokens stay right, nothing leaks, and it goes on afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import Engine, connector

from layerflow.agent.connection.control import fetch_status
from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
RECOVERY_S = 30.0
# 4 KiB a token over 4 MB/s: a prompt of 300 tokens takes 0.3 s, and kills hit transfers under way.
SLOW = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "64KiB"}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def until(server: ServerProcess, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until a server's status says so."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        status = fetch_status(server.endpoint)
        if what(status):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.002)


def loading(status: dict[str, Any]) -> bool:
    """A step has begun to load. Loads by plans are the worker's own: the core counts no bytes of theirs."""
    return bool(status["flow"]["steps"] and status["pool"]["pinned"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "mode"), [("llama", "layerwise"), ("llama", "bulk"), ("gemma3", "layerwise")])
def test_the_server_is_killed_under_eight_requests(
    model: str, mode: str, serve: Serve, vllm: Start, plain: Start
) -> None:
    server = serve(**SLOW)
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode=mode, chunk_tokens=CHUNK))
    prompts = [prompt(seed, 150 + 20 * seed) for seed in range(8)]
    wanted = [answer.tokens for answer in plain(model).generate(*prompts, max_tokens=MAX_TOKENS)]
    engine.generate(*prompts)
    settled(server.endpoint)
    engine.begin(prompts, MAX_TOKENS)
    until(server, loading)
    server.kill()
    assert [answer.tokens for answer in engine.finish()] == wanted
    # Nobody is there: prompts are computed.
    answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
    assert [(answer.tokens, answer.cached) for answer in answers] == [(tokens, 0) for tokens in wanted]
    engine.assert_no_block_lost()
    server.restart()
    until(server, lambda status: any(session["memory"] for session in status["sessions"]))
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "mode", "ahead"),
    [("llama", "layerwise", False), ("llama", "bulk", False), ("gemma3", "layerwise", False),
     ("gemma3", "layerwise", True)],
)  # fmt: skip
def test_aborts_and_preemption(model: str, mode: str, ahead: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    """200 requests in a cache for a few: many are preempted, some aborted at every stage, none gets a wrong token."""
    server = serve(pool__lease_ms=600_000)  # what is pinned afterwards was forgotten, and does not expire in this test
    blocks = 48 if model == "llama" else 108  # of one cache group, of three
    small = {"num_gpu_blocks_override": blocks, "max_num_seqs": 16, "max_model_len": 1024}
    config = connector(server.endpoint, mode=mode, chunk_tokens=CHUNK)
    engine = vllm(model, kv_transfer_config=config, ahead=ahead, **small)
    source = random.Random(11)
    heads = [prompt(seed, 200) for seed in range(10)]
    prompts = [
        source.choice(heads)[: source.randrange(1, 201)] + prompt(100 + number, source.randrange(1, 120))
        for number in range(200)
    ]
    aborts = {number: source.randrange(0, 250) for number in source.sample(range(200), 50)}
    wanted = plain(model, **small).generate(*prompts, max_tokens=40)
    for _ in range(2):
        engine.begin(prompts, 40, aborts)
        answers = engine.finish()
        wrong = [
            number
            for number, (answer, right) in enumerate(zip(answers, wanted, strict=True))
            if answer.tokens != right.tokens and not (answer.reason == "abort" and number in aborts)
        ]
        assert not wrong
        engine.assert_no_block_lost()
        settled(server.endpoint)
        until(server, lambda status: status["pool"]["pinned"] == 0)
        assert 0 < sum(answer.reason == "abort" for answer in answers) <= len(aborts)
    assert engine.preemptions() > 20
    assert sum(answer.cached for answer in answers) > 0

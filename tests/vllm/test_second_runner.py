"""vLLM's second model runner, under an emulated device, with asynchronous scheduling: see :mod:`emulated_device`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comparison import MAX_TOKENS, begin_to_load, kill_amid_loads, prompt, settled, until
from e2e.stopping import go_on, stop
from engines import VERSION, close, connector
from second_runner import BLOCK, LAYERS, TRITON, Hook, SecondRunner, build

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
# 512 bytes a token: a prompt of 100 tokens takes 0.13 s, so passes begin, and kills hit, while loads are under way.
SLOW = {"pool__link_gbps": 0.0004, "transfer__max_transfer_bytes": "64KiB"}

Serve = Callable[..., ServerProcess]
Start = Callable[..., SecondRunner]

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(VERSION < (0, 32), reason="the emulated device is for vLLM 0.32 and newer"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies."""
    script = Path(__file__).with_name("triton.sh")
    environment = os.environ | {"PYTHON": sys.executable}
    made = subprocess.run([script, TRITON], check=False, env=environment, capture_output=True, text=True)
    if made.returncode == 3:
        pytest.skip(made.stderr.strip())
    assert not made.returncode, made.stderr
    return build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def runner(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start vLLMs with layerflow."""
    engines: list[SecondRunner] = []

    def start(server: ServerProcess, mode: str = "layerwise", **arguments: Any) -> SecondRunner:
        config = connector(server.endpoint, mode=mode, chunk_tokens=CHUNK)
        log = tmp_path / f"vllm-{len(engines)}.log"
        engines.append(SecondRunner("llama", log, folder=model, kv_transfer_config=config, **arguments))
        assert engines[-1].facts["runner"] == "vllm.v1.worker.gpu.model_runner"
        assert engines[-1].facts["asynchronous"]
        return engines[-1]

    yield start
    close(engines)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondRunner]:
    """One without layerflow: what tokens must be."""
    engine = SecondRunner("llama", tmp_path_factory.mktemp("plain") / "vllm.log", folder=model)
    yield engine
    close([engine])


def steps(hooks: list[Hook]) -> list[list[Hook]]:
    """The hooks of each step; what comes before its first one belongs to it."""
    found: list[list[Hook]] = [[]]
    for hook in hooks:
        found[-1].append(hook)
        if hook[0] == "get_transfer_results":
            found.append([])
    assert not found.pop(), "a step without an end"
    return found


def test_an_engine_loads_what_another_has_saved(serve: Serve, runner: Start, reference: SecondRunner) -> None:
    server = serve(**SLOW)
    asked = prompt(1, 8 * BLOCK + 5)
    wanted = reference.one(asked, MAX_TOKENS).tokens
    first = runner(server)
    assert first.one(asked, MAX_TOKENS).tokens == wanted
    settled(server.endpoint)
    second = runner(server)
    second.one(prompt(9, 2 * BLOCK), MAX_TOKENS)  # in which layerflow sees that layers ask for their blocks
    answer = second.one(asked, MAX_TOKENS)
    assert answer.tokens == wanted
    assert answer.cached == len(asked) - 1
    assert second.loads() == (1, 0)
    shared = [len(saved & loaded) for saved, loaded in zip(first.blocks(), second.blocks(), strict=True)]
    assert len(shared) == LAYERS
    assert min(shared) >= len(asked) // BLOCK
    others = [asked[: 5 * BLOCK] + prompt(seed, 40) for seed in (2, 3)]
    wanted_of_others = [each.tokens for each in reference.generate(*others, max_tokens=MAX_TOKENS)]
    answers = second.generate(*others, max_tokens=MAX_TOKENS)
    assert [each.tokens for each in answers] == wanted_of_others
    assert [each.cached for each in answers] == [5 * BLOCK] * 2
    for engine in (first, second):
        engine.assert_no_block_lost()


def opened(inside: bool) -> list[Hook]:
    """How a step begins.

    :param inside: of its forward context.
    """
    return [("handle_preemptions", inside), ("bind_connector_metadata", inside)]


LOAD: list[Hook] = [("start_load_kv", None)]
ATTENTION: list[Hook] = [
    (hook, f"model.layers.{layer}.self_attn.attn")
    for layer in range(LAYERS)
    for hook in ("wait_for_layer_load", "save_kv_layer")
]
END: list[Hook] = [("wait_for_save", None), ("get_transfer_results", None)]


def test_hooks_come_as_the_replays_of_it_have_them(serve: Serve, runner: Start, reference: SecondRunner) -> None:
    """``tests/connectors/test_vllm_seen.py`` replays this order: blocks are zeroed before the first hook of a step.

    Loads are begun before the pass where the step has some, else behind it. Steps that move nothing ask no layer.
    """
    server = serve()
    engine = runner(server, zeroing=True)
    asked = prompt(1, 3 * BLOCK)
    zeroed: list[Hook] = [("zero_block_ids", 3)]
    for attending in (ATTENTION + LOAD, LOAD + ATTENTION):
        engine.hooks()
        assert engine.one(asked, 3).tokens == reference.one(asked, 3).tokens
        engine.assert_no_block_lost()
        seen = steps(engine.hooks())
        assert seen[0] == zeroed + opened(True) + attending + END
        assert seen[1] == [("zero_block_ids", 1), *opened(True), *LOAD, *END]
        assert opened(False) + LOAD + END in seen, "a step without a pass"
        settled(server.endpoint)
    assert engine.loads() == (1, 0)


def test_whole_graphs_are_replayed_behind_their_loads(serve: Serve, runner: Start, reference: SecondRunner) -> None:
    """A hit of all tokens but one leaves a pass that only decodes."""
    server = serve(**SLOW)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
    engine = runner(server, enforce_eager=False, compilation_config=graphs, max_num_seqs=2)
    asked = prompt(1, 3 * BLOCK + 5)
    wanted = reference.one(asked, MAX_TOKENS).tokens
    for cached in (0, len(asked) - 1):
        engine.hooks()
        answer = engine.one(asked, MAX_TOKENS)
        assert (answer.tokens, answer.cached) == (wanted, cached)
        engine.assert_no_block_lost()
        seen = steps(engine.hooks())
        settled(server.endpoint)
    assert seen[0] == opened(False) + LOAD + END
    assert engine.loads() == (1, 0)


def test_the_server_is_killed_amid_loads(serve: Serve, runner: Start, reference: SecondRunner) -> None:
    server = serve(**SLOW)
    engine = runner(server)
    prompts = [prompt(seed, 90 + 10 * seed) for seed in range(3)]
    wanted = [answer.tokens for answer in reference.generate(*prompts, max_tokens=MAX_TOKENS)]
    kill_amid_loads(engine, server, prompts, wanted)
    for cached in (0, len(prompts[0]) - 1):
        answer = engine.one(prompts[0], MAX_TOKENS)
        assert (answer.tokens, answer.cached) == (wanted[0], cached)
        settled(server.endpoint)
    engine.assert_no_block_lost()


def test_the_server_stands_still_amid_loads(serve: Serve, runner: Start, reference: SecondRunner) -> None:
    server = serve(**SLOW, transfer__step_timeout_ms=2_000)
    engine = runner(server)
    prompts = [prompt(seed, 90 + 10 * seed) for seed in range(3)]
    wanted = [answer.tokens for answer in reference.generate(*prompts, max_tokens=MAX_TOKENS)]
    begin_to_load(engine, server, prompts)
    stop(server.process.pid)
    assert [answer.tokens for answer in engine.finish()] == wanted
    go_on(server.process.pid)
    answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
    assert [answer.tokens for answer in answers] == wanted
    engine.assert_no_block_lost()


@pytest.mark.parametrize("zeroing", [False, True], ids=["as it is", "zeroing"])
def test_aborts_and_preemption(zeroing: bool, serve: Serve, runner: Start, reference: SecondRunner) -> None:
    """Two prompts fill the cache, and a third is there: who grows takes the blocks of another."""
    server = serve(pool__lease_ms=600_000)  # what is pinned afterwards was forgotten, and does not expire in this test
    engine = runner(server, zeroing=zeroing, num_gpu_blocks_override=17, max_model_len=256, max_num_seqs=4)
    prompts = [prompt(seed, 8 * BLOCK - 2) for seed in range(3)]
    wanted = [answer.tokens for answer in reference.generate(*prompts, max_tokens=MAX_TOKENS)]
    for aborts in ({}, {1: 6}):
        engine.begin(prompts, MAX_TOKENS, aborts)
        answers = engine.finish()
        assert {number for number, answer in enumerate(answers) if answer.reason == "abort"} == set(aborts)
        assert all(
            answer.tokens == tokens or answer.reason == "abort" for answer, tokens in zip(answers, wanted, strict=True)
        )
        engine.reset()
        settled(server.endpoint)
        until(server, lambda status: status["pool"]["pinned"] == 0)
    assert engine.preemptions() > 0
    assert sum(answer.cached for answer in answers) > 0
    assert zeroing == any(name == "zero_block_ids" for name, _ in engine.hooks())

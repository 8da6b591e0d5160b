"""Prompts in pieces, several engines of a kind, and other connectors beside ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison import prompt
from engines import Engine, connector
from legs import concurrently, prefill_first
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

MAX_TOKENS = 6
EXTRA = {"chunk_tokens": 64}

Start = Callable[..., Engine]
Serve = Callable[..., ServerProcess]


def told(answer: Answer) -> tuple[str, int]:
    assert answer.transfer is not None
    own = answer.transfer["layerflow"]
    return own["handoff"], own["hit_tokens"]


@pytest.mark.timeout(300)
def test_chunked_prefill(serve: Serve, vllm: Start, plain: Start) -> None:
    """P computes a prompt in pieces, others between them; D loads it as a whole."""
    server = serve()
    pieces = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    prefill = vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_producer", **EXTRA), **pieces)
    decode = vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_consumer", **EXTRA))
    asked = [prompt(number, 150 + 100 * number) for number in range(4)]
    wanted = [plain("llama").one(each, max_tokens=MAX_TOKENS).tokens for each in asked]
    answers = concurrently(prefill, decode, asked, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == wanted
    assert [told(answer) for answer in answers] == [("loaded", len(each) - 1) for each in asked], answers
    for engine in (prefill, decode):
        engine.assert_no_block_lost()


@pytest.mark.timeout(400)
def test_two_of_each(serve: Serve, vllm: Start, plain: Start) -> None:
    """Any prefill engine hands over to any decode engine of its server."""
    server = serve()
    prefill = [vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_producer", **EXTRA)) for _ in range(2)]
    decode = [vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_consumer", **EXTRA)) for _ in range(2)]
    for number, (p, d) in enumerate(itertools.product(prefill, decode)):
        asked = [prompt(300 + 2 * number, 170), prompt(301 + 2 * number, 270)]
        wanted = [plain("llama").one(each, max_tokens=MAX_TOKENS).tokens for each in asked]
        answers = concurrently(p, d, asked, MAX_TOKENS)
        assert [answer.tokens for answer in answers] == wanted
        assert [told(answer) for answer in answers] == [("loaded", len(each) - 1) for each in asked], answers


def among(ours: dict[str, Any], folder: Path, role: str) -> dict[str, Any]:
    """Beside vLLM's example connector, which is asked first and has nothing."""
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [theirs, ours]},
    }


@pytest.mark.timeout(400)
def test_inside_a_multi_connector(serve: Serve, vllm: Start, plain: Start, tmp_path: Path) -> None:
    """Where extra config ``pd`` says so; else NIXL's keys are left to others."""
    server = serve()
    arguments = {"disable_hybrid_kv_cache_manager": True}

    def engine(role: str, pd: bool) -> Engine:
        ours = connector(server.endpoint, role, **({"pd": True} if pd else {}), **EXTRA)
        return vllm("llama", kv_transfer_config=among(ours, tmp_path / f"{role}-{pd}", role), **arguments)

    decode = engine("kv_consumer", pd=True)
    for number, speaks in enumerate((True, False)):
        asked = prompt(200 + number, 200)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        prefill = engine("kv_producer", pd=speaks)
        answer = prefill_first(prefill, decode, asked, MAX_TOKENS)
        assert answer.tokens == wanted
        assert answer.transfer is not None
        assert (answer.transfer["layerflow"].get("handoff") == "loaded") is speaks
        for each in (prefill, decode):
            each.assert_no_block_lost()
        prefill.close()

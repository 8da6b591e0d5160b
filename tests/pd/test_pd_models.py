"""Prompts go from one vLLM to another through one server: tokens as a single instance's, all but one token loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import prompt
from engines import Engine, connector
from legs import ORDERS, concurrently
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

MAX_TOKENS = 6
CHUNK = {"llama": 64, "mla": 64, "gemma3": 64}

Start = Callable[..., Engine]
Serve = Callable[..., ServerProcess]


def pair(model: str, endpoint: str, vllm: Start, **arguments: Any) -> tuple[Engine, Engine]:
    """A prefill and a decode engine."""
    extra = {"chunk_tokens": CHUNK[model]} if model in CHUNK else {}
    arguments = {"disable_log_stats": False} | arguments
    prefill = vllm(model, kv_transfer_config=connector(endpoint, "kv_producer", **extra), **arguments)
    return prefill, vllm(model, kv_transfer_config=connector(endpoint, "kv_consumer", **extra), **arguments)


def external_hits(engine: Engine) -> float:
    return engine.metric("vllm:external_prefix_cache_hits")


@pytest.fixture(scope="module")
def llama(serve: Serve, vllm: Start) -> tuple[Engine, Engine]:
    return pair("llama", serve().endpoint, vllm)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tokens", [200, 256, 5])
def test_llama(order: str, tokens: int, llama: tuple[Engine, Engine], plain: Start) -> None:
    asked = prompt(1000 * list(ORDERS).index(order) + tokens, tokens)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS)
    before = external_hits(llama[1])
    answer = ORDERS[order](*llama, asked, MAX_TOKENS)
    assert answer.tokens == wanted.tokens
    assert answer.transfer is not None
    assert answer.transfer["layerflow"].items() >= {"hit_tokens": tokens - 1, "handoff": "loaded"}.items()
    assert external_hits(llama[1]) - before == tokens - 1
    for engine in llama:
        engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_many_at_once(llama: tuple[Engine, Engine], plain: Start) -> None:
    asked = [prompt(5000 + number, 100 + 37 * number) for number in range(8)]
    wanted = plain("llama").generate(*asked, max_tokens=MAX_TOKENS)
    answers = concurrently(*llama, asked, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
    assert all(answer.transfer["layerflow"]["handoff"] == "loaded" for answer in answers if answer.transfer)
    for engine in llama:
        engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["mla", "gemma3"])
def test_other_caches(model: str, serve: Serve, vllm: Start, plain: Start) -> None:
    """Latent attention; sliding windows beside full attention."""
    engines = pair(model, serve().endpoint, vllm)
    asked = [prompt(7000 + number, 90 + 61 * number) for number in range(4)]
    wanted = [plain(model).one(each, max_tokens=MAX_TOKENS).tokens for each in asked]
    answers = concurrently(*engines, asked, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == wanted
    assert [told(answer) for answer in answers] == [("loaded", len(each) - 1) for each in asked]
    assert external_hits(engines[1]) == sum(len(each) - 1 for each in asked)
    for engine in engines:
        engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_recurrent_state(serve: Serve, vllm: Start, plain: Start) -> None:
    """P computes all but the last token, once; the state behind it is D's beginning."""
    engines = pair("qwen3next", serve().endpoint, vllm)
    asked, wanted = [], []
    for number, tokens in enumerate((199, 700, 320)):
        # In bfloat16 a token computed by itself differs a little from one computed with its prompt. So the prompt's
        # last token is one that the single instance has generated, and therefore computed by itself, as D does.
        known = prompt(8000 + number, tokens)
        generated = plain("qwen3next").one(known, max_tokens=1 + MAX_TOKENS).tokens
        asked.append([*known, generated[0]])
        wanted.append(generated[1:])
    for each, tokens in zip(asked, wanted, strict=True):
        answer = concurrently(*engines, [each], MAX_TOKENS)[0]
        assert answer.tokens == tokens
        assert told(answer) == ("loaded", len(each) - 1)
    for engine in engines:
        engine.assert_no_block_lost()


def told(answer: Answer) -> tuple[str, int]:
    assert answer.transfer is not None
    own = answer.transfer["layerflow"]
    return own["handoff"], own["hit_tokens"]

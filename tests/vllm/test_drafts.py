"""Speculative decoding: a draft model's layers are loaded where they are stored, and no hit needs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparison import prompt, settled
from drafting import DRAFTED, Guesses, needs_drafts
from engines import Engine, connector
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

pytestmark = needs_drafts

TOKENS, MAX_TOKENS, CHUNK = 300, 12, 64
Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def serve_whole(engine: Engine, server: ServerProcess, asked: list[int]) -> Answer:
    """Returns when all that it saves is stored."""
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    engine.assert_no_block_lost()
    settled(server.endpoint)
    return answer


def drafting(engine: Engine, server: ServerProcess, asked: list[int]) -> tuple[tuple[int, ...], int, float]:
    """Its tokens, how many of the prompt's were loaded, and the share of guesses that was right."""
    guesses = Guesses(engine)
    answer = serve_whole(engine, server, asked)
    return tuple(answer.tokens), answer.cached, guesses.share()


@pytest.mark.timeout(300)
def test_engines_with_and_without_a_draft_model_share_prompts(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first, second = (vllm("llama", kv_transfer_config=config, **DRAFTED) for _ in range(2))
    other = vllm("llama", kv_transfer_config=config)
    for seed in (1, 2):
        asked = prompt(seed, TOKENS)
        wanted = tuple(plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens)
        tokens, cached, share = drafting(first, server, asked)
        assert (tokens, cached) == (wanted, 0)
        tokens, cached, with_layers = drafting(second, server, asked)
        assert (tokens, cached) == (wanted, TOKENS - 1)
        # vLLM's first guesses are lost where one token is left to compute, with its own prefix cache too.
        assert (share, with_layers >= 0.75) == (1.0, True), with_layers
        answer = other.one(asked, max_tokens=MAX_TOKENS)
        assert (tuple(answer.tokens), answer.cached) == (wanted, TOKENS - 1)

        asked = prompt(100 + seed, TOKENS)
        wanted = tuple(plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens)
        assert tuple(serve_whole(other, server, asked).tokens) == wanted
        tokens, cached, without_layers = drafting(first, server, asked)
        assert (tokens, cached) == (wanted, TOKENS - 1), "layers that nobody stored are no miss"
        assert without_layers < with_layers
    for engine in (first, second, other):
        engine.assert_no_block_lost()

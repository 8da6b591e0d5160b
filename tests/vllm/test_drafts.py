"""Speculative decoding: a draft model's layers are loaded where they are stored, and no hit needs them.

The draft model is the model itself: what it guesses from a right cache is always accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import prompt
from engines import MODELS, VERSION, Engine, connector

from layerflow_cli.bench.harness import ServerProcess

pytestmark = pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM runs no draft model on a CPU")

TOKENS, MAX_TOKENS, CHUNK = 300, 12, 64
DRAFTED: dict[str, Any] = {
    "speculative_config": {"method": "draft_model", "model": str(MODELS / "llama"), "num_speculative_tokens": 2},
    "disable_log_stats": False,
}
Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


class Drafting:
    """Counts what its draft model guesses, and how much of that is accepted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def one(self, asked: list[int]) -> tuple[tuple[int, ...], int, float]:
        """Its tokens, how many of the prompt's were loaded, and the share of guesses that was right."""
        names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
        before = [self.engine.metric(name) for name in names]
        answer = self.engine.one(asked, max_tokens=MAX_TOKENS)
        accepted, guessed = (self.engine.metric(name) - was for name, was in zip(names, before, strict=True))
        return tuple(answer.tokens), answer.cached, accepted / guessed


@pytest.mark.timeout(300)
def test_engines_with_and_without_a_draft_model_share_prompts(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first, second = (Drafting(vllm("llama", kv_transfer_config=config, **DRAFTED)) for _ in range(2))
    other = vllm("llama", kv_transfer_config=config)
    for seed in (1, 2):
        asked = prompt(seed, TOKENS)
        wanted = tuple(plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens)
        tokens, cached, share = first.one(asked)
        assert (tokens, cached) == (wanted, 0)
        tokens, cached, with_layers = second.one(asked)
        assert (tokens, cached) == (wanted, TOKENS - 1)
        # vLLM's first guesses are lost where one token is left to compute, with its own prefix cache too.
        assert (share, with_layers >= 0.75) == (1.0, True), with_layers
        answer = other.one(asked, max_tokens=MAX_TOKENS)
        assert (tuple(answer.tokens), answer.cached) == (wanted, TOKENS - 1)

        asked = prompt(100 + seed, TOKENS)
        wanted = tuple(plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens)
        assert tuple(other.one(asked, max_tokens=MAX_TOKENS).tokens) == wanted
        tokens, cached, without_layers = first.one(asked)
        assert (tokens, cached) == (wanted, TOKENS - 1), "layers that nobody stored are no miss"
        assert without_layers < with_layers
    for engine in (first.engine, second.engine, other):
        engine.assert_no_block_lost()

"""Every cache layout: full attention, latent, sliding windows, experts, recurrent state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparison import MAX_TOKENS, Comparison, prompt, settled
from engines import ONLY_SAVED, Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
ATTENDING = ["llama", "mla", "gemma3", "gptoss", "qwen3moe"]


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *((model, "layerwise") for model in ATTENDING),
        *((model, "bulk") for model in ("llama", "gemma3")),
        *(pytest.param(model, "bulk", marks=pytest.mark.campaign) for model in ("mla", "gptoss", "qwen3moe")),
    ],
)
def test_tokens_and_hits(
    model: str,
    mode: str,
    serve: Callable[..., ServerProcess],
    vllm: Callable[..., Engine],
    plain: Callable[..., Engine],
) -> None:
    server = serve()
    engine = vllm(model, kv_transfer_config=connector(server.endpoint, mode=mode, chunk_tokens=CHUNK))
    both = Comparison(plain(model), engine, server.endpoint, CHUNK, loads=model not in ONLY_SAVED)
    first = prompt(1, 300)
    both.serve(first)
    both.serve(first)
    both.serve(first[:200] + prompt(2, 50))  # another prompt after three chunks
    both.serve(first + prompt(3, 40))  # goes on from the first one's tail
    both.serve(first[:128])  # a prefix that ends with a chunk
    both.serve(first[:150])  # ... and within one
    both.serve(first, first[:200] + prompt(2, 50), prompt(4, 90))
    engine.assert_no_block_lost()


def test_a_prefix_lm_computes_every_prompt_whole(
    serve: Callable[..., ServerProcess], vllm: Callable[..., Engine], plain: Callable[..., Engine]
) -> None:
    """Its tokens attend to those behind them: what another prompt made of the same beginning is not theirs."""
    server = serve()
    engine = vllm("hrmtext", kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK))
    first = prompt(1, 300)
    for asked in (first, first, first[:200] + prompt(2, 100)):
        answer = engine.one(asked, max_tokens=MAX_TOKENS)
        assert (answer.tokens, answer.cached) == (plain("hrmtext").one(asked, max_tokens=MAX_TOKENS).tokens, 0)
        assert not settled(server.endpoint)["pool"]["objects"]
    assert "attend to later ones" in engine.output()
    engine.assert_no_block_lost()


def test_recurrent_state_is_continued_where_it_was_kept(
    serve: Callable[..., ServerProcess], vllm: Callable[..., Engine], plain: Callable[..., Engine]
) -> None:
    """vLLM keeps a state at the last block boundary of a prompt, and hits end there and nowhere else."""
    server = serve()
    engine = vllm("qwen3next", kv_transfer_config=connector(server.endpoint, mode="layerwise"))
    reference = plain("qwen3next")
    block = engine.facts["block_size"]
    assert block == reference.facts["block_size"]
    first = prompt(1, 4 * block + 60)
    for asked, hit in [
        (first, 0),
        (first, 4 * block),
        (first[: 4 * block + 20] + prompt(2, 50), 4 * block),
        (first[: 3 * block + 20] + prompt(2, 50), 0),  # keeps a state at three blocks
        (first[: 3 * block + 20] + prompt(5, 70), 3 * block),
        (first[: 2 * block], 0),
    ]:
        reference.reset()
        engine.reset()  # hits are layerflow's, not vLLM's own
        answer = engine.one(asked, max_tokens=MAX_TOKENS)
        assert answer.tokens == reference.one(asked, max_tokens=MAX_TOKENS).tokens
        assert answer.cached == hit, f"a prompt of {len(asked)} tokens, blocks of {block}"
        settled(server.endpoint)

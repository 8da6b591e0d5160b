"""A model that sees: its prompts are found as far as their images show the same, whatever clients call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import Engine, connector
from models import IMAGE, PLACES
from scenario import Picture, Terms

from layerflow_cli.bench.harness import ServerProcess

CHUNK, BLOCK = 64, 32
WHOLE = PLACES + 3  # what vLLM makes of an image's one place in the prompt
HEAD, BETWEEN, TAIL = prompt(1, 100), prompt(2, 90), prompt(3, 40)
ASKED = [*HEAD, IMAGE, *BETWEEN, IMAGE, *TAIL]
SECOND = len(HEAD) + WHOLE + len(BETWEEN)
LENGTH = SECOND + WHOLE + len(TAIL)
# Prompts are cut into pieces, and images too where the model allows it.
PIECES = {"max_num_batched_tokens": 128, "max_num_seqs": 16}
MODELS: dict[str, dict[str, Any]] = {
    "causal": {},
    # The places of an image attend to each other: vLLM computes an image whole. Its attention on a CPU is causal still.
    "prefix-LM": {"hf_overrides": {"is_mm_prefix_lm": True}},
}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def showing(*seeds: int) -> Terms:
    return Terms(pictures=tuple(Picture(seed) for seed in seeds))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["causal", pytest.param("prefix-LM", marks=pytest.mark.campaign)])
def test_prompts_hit_as_far_as_they_show_the_same(kind: str, serve: Serve, vllm: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("idefics3", kv_transfer_config=config, **PIECES, **MODELS[kind])
    alone = vllm("idefics3", **PIECES, **MODELS[kind])
    seen = set()
    for asked, terms, same in [
        (ASKED, showing(1, 2), 0),
        (ASKED, showing(1, 2), LENGTH),
        (ASKED, showing(1, 3), SECOND),
        (ASKED, showing(4, 2), len(HEAD)),
        (ASKED, showing(2, 1), len(HEAD)),
        (ASKED[: len(HEAD) + 1] + TAIL, showing(1), len(HEAD) + WHOLE),
        (HEAD + ASKED[len(HEAD) + 1 :], showing(2), len(HEAD)),
        (ASKED, showing(1, 3), LENGTH),
    ]:
        answer = engine.one(asked, max_tokens=MAX_TOKENS, terms=terms)
        assert answer.tokens == alone.one(asked, max_tokens=MAX_TOKENS, terms=terms).tokens
        if same == LENGTH:
            assert answer.cached == LENGTH - 1
        else:
            assert same // BLOCK * BLOCK <= answer.cached <= same, terms
        seen.add(answer.tokens)
        settled(server.endpoint)
    assert len(seen) == 6, "images that change nothing prove nothing"
    together = [showing(1, 2), showing(5, 2), showing(1, 5)]
    answers = engine.generate(*[ASKED] * 3, max_tokens=MAX_TOKENS, terms=together)
    wanted = alone.generate(*[ASKED] * 3, max_tokens=MAX_TOKENS, terms=together)
    assert [each.tokens for each in answers] == [each.tokens for each in wanted]
    engine.assert_no_block_lost()


@pytest.mark.timeout(400)
def test_a_client_that_calls_its_image_another_spoils_nobodys(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    liar, other = (vllm("idefics3", kv_transfer_config=config) for _ in range(2))
    asked = [*HEAD, IMAGE, *TAIL]
    wanted = [plain("idefics3").one(asked, terms=showing(seed)).tokens for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    answer = liar.one(asked, terms=Terms(pictures=(Picture(2, "one"),)))
    assert (answer.tokens, answer.cached) == (wanted[1], 0)
    settled(server.endpoint)
    for picture, cached in ((Picture(1, "one"), 96), (Picture(2), len(HEAD) + WHOLE + len(TAIL) - 1)):
        answer = other.one(asked, terms=Terms(pictures=(picture,)))
        assert (answer.tokens, answer.cached) == (wanted[picture.seed - 1], cached)
        settled(server.endpoint)
    liar.assert_no_block_lost()
    other.assert_no_block_lost()

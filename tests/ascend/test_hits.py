"""What vLLM-Ascend finds again, by layerflow and by its own pool: the same tokens, from caches that hold no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ascend import BLOCK, Hooks
from comparison import expected_hit, prompt, settled
from conftest import Rig
from scenario import Prompt

MAX_TOKENS = 3


def prompts(seed: int) -> list[tuple[Prompt, ...]]:
    """Prompts by arrival, those of a tuple together: again, with a beginning that was seen, around a block's end."""
    first, long = prompt(seed, 300), prompt(seed + 1, 700)
    fork = first[:280] + prompt(seed + 2, 37)
    alone = (first, first, fork, fork, long, first[:BLOCK], first[: BLOCK + 1])
    together = (first[:200] + prompt(seed + 3, 20), long[:600] + prompt(seed + 4, 30), prompt(seed + 5, 90), fork)
    return [*((each,) for each in alone), together]


def asks_for_no_layer(rig: Rig, asked: Sequence[Prompt], hits: Sequence[int]) -> bool:
    """So does vLLM-Ascend's latent attention in a pass that computes one token of each request."""
    return rig.model == "mla" and all(len(each) - hit == 1 for each, hit in zip(asked, hits, strict=True))


def serve(rig: Rig, *asked: Prompt) -> tuple[list[int], list[int]]:
    """Serve prompts with all three engines; the caches of two hold nothing.

    AscendStoreConnector loads a layer when it is awaited, so with latent attention it may compute on what it never
    loaded, see :func:`asks_for_no_layer`. All other tokens must be right.

    :returns: how many tokens of each prompt layerflow has found, and AscendStoreConnector.
    """
    right = rig.right(*asked, max_tokens=MAX_TOKENS)
    hits = []
    for engine in (rig.ours, rig.theirs):
        engine.wipe()
        answers = engine.generate(*asked, max_tokens=MAX_TOKENS)
        hits.append([answer.cached for answer in answers])
        spoilt = engine is rig.theirs and asks_for_no_layer(rig, asked, hits[-1])
        assert spoilt or not right.wrong(answers)
    rig.ours.assert_no_block_lost()
    settled(rig.server.endpoint)
    return hits[0], hits[1]


@pytest.mark.parametrize(
    "believed_s",
    [
        pytest.param(30.0, id="as it is", marks=pytest.mark.campaign),  # it finds less then
        pytest.param(0.0, id="without its window of misses"),
    ],
)
def test_every_prompt_hits_at_least_what_the_engines_own_pool_finds(rig: Rig, believed_s: float) -> None:
    """AscendStoreConnector believes for 30 s that a block is not stored, though it has stored it since."""
    rig.theirs.believe_misses(believed_s)
    stored: list[Prompt] = []
    found = 0
    for asked in prompts(100 + int(believed_s)):
        ours, theirs = serve(rig, *asked)
        assert ours == [expected_hit(each, stored, BLOCK, block=BLOCK) for each in asked]
        assert all(own >= other for own, other in zip(ours, theirs, strict=True)), theirs
        stored += asked
        found += sum(theirs)
    if not believed_s:
        assert found > 4 * BLOCK, "the engine's own pool finds next to nothing: the comparison proves nothing"


def test_each_layer_is_awaited_and_saved_once(rig: Rig) -> None:
    """Where it is asked for: layerflow waits by itself for what :func:`asks_for_no_layer`.

    An indexer's cache has no hooks of its own: it is read beside its layer's.
    """
    first = prompt(200, 300)
    fork = first[:280] + prompt(201, 37)
    once = dict.fromkeys((name for name in rig.ours.layers() if "indexer" not in name), 1)
    failed = rig.ours.failed_loads()
    for asked, known in ((first, 0), (first, len(first) - 1), (fork, 2 * BLOCK)):
        awaited = {} if asks_for_no_layer(rig, [asked], [known]) else once
        rig.ours.wipe()
        rig.ours.hooks()
        right = rig.right(asked, max_tokens=MAX_TOKENS)
        answer = rig.ours.one(asked, max_tokens=MAX_TOKENS)
        assert answer.cached == known
        assert not right.wrong([answer])
        rig.ours.assert_no_block_lost()
        settled(rig.server.endpoint)
        passes: Hooks = rig.ours.hooks()
        assert all(calls in ({}, once) for each in passes for calls in each.values()), passes
        assert {"wait_for_layer_load": awaited, "save_kv_layer": once} in passes
    assert rig.ours.failed_loads() == failed, "what was loaded has been computed again"

"""What vLLM-Ascend finds again, by layerflow and by its own pool: the same tokens, from caches that hold no more."""

from __future__ import annotations

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


def serve(rig: Rig, *asked: Prompt) -> tuple[list[int], list[int]]:
    """Serve prompts with all three engines; the caches of two hold nothing.

    :returns: how many tokens of each prompt layerflow has found, and AscendStoreConnector.
    """
    wanted = [answer.tokens for answer in rig.plain.generate(*asked, max_tokens=MAX_TOKENS)]
    hits = []
    for engine in (rig.ours, rig.theirs):
        engine.wipe()
        answers = engine.generate(*asked, max_tokens=MAX_TOKENS)
        assert [answer.tokens for answer in answers] == wanted
        hits.append([answer.cached for answer in answers])
    rig.ours.assert_no_block_lost()
    settled(rig.server.endpoint)
    return hits[0], hits[1]


@pytest.mark.parametrize("believed_s", [30.0, 0.0], ids=["as it is", "without its window of misses"])
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
    asked = prompt(200, 300)
    once = dict.fromkeys(rig.ours.layers(), 1)
    for known in (0, len(asked) - 1):
        rig.ours.wipe()
        rig.ours.hooks()
        assert rig.ours.one(asked, max_tokens=MAX_TOKENS).cached == known
        rig.ours.assert_no_block_lost()
        settled(rig.server.endpoint)
        passes: Hooks = rig.ours.hooks()
        assert all(calls in ({}, once) for each in passes for calls in each.values()), passes
        assert {"wait_for_layer_load": once, "save_kv_layer": once} in passes

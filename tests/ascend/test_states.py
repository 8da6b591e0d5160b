"""A model with recurrent state on vLLM-Ascend: Qwen3-Next's gated delta net, continued where its state was kept."""

from __future__ import annotations

import random
import time

import pytest
from ascend import AscendEngine
from churn import Churn
from comparison import prompt, settled, until
from conftest import RECURRENT, Rig, Rigs
from scenario import Prompt

MAX_TOKENS = 3

pytestmark = pytest.mark.xdist_group(RECURRENT)


@pytest.fixture
def recurrent(rigs: Rigs) -> Rig:
    """Its engines."""
    return rigs[RECURRENT]


def serve(rig: Rig, *asked: Prompt, engine: AscendEngine | None = None) -> list[int]:
    """Serve prompts from caches that hold nothing; the tokens must be right.

    :param engine: None = with layerflow.
    :returns: how many tokens of each were found.
    """
    engine = engine or rig.ours
    right = rig.right(*asked, max_tokens=MAX_TOKENS)
    engine.wipe()
    answers = engine.generate(*asked, max_tokens=MAX_TOKENS)
    assert not right.wrong(answers)
    engine.assert_no_block_lost()
    settled(rig.server.endpoint)
    return [answer.cached for answer in answers]


@pytest.mark.timeout(1200)
def test_hits_end_where_a_state_was_kept(recurrent: Rig) -> None:
    """At the last boundary of a prompt's blocks, and nowhere else, as those of the engine's own pool do.

    What is loaded is all there is: caches are wiped.
    """
    block = recurrent.ours.facts["block_size"]
    assert block == recurrent.plain.facts["block_size"]
    recurrent.theirs.believe_misses(0.0)
    first = prompt(600, 3 * block + 60)
    for asked, hit in (
        (first, 0),
        (first, 3 * block),
        (first[: 3 * block + 20] + prompt(601, 50), 3 * block),
        (first[: 2 * block + 20] + prompt(602, 50), 0),  # keeps a state at two blocks
        (first[: 2 * block + 20] + prompt(603, 70), 2 * block),
        (first[:block], 0),
    ):
        assert serve(recurrent, asked) == [hit], f"a prompt of {len(asked)} tokens, blocks of {block}"
        assert serve(recurrent, asked, engine=recurrent.theirs) == [hit], "AscendStoreConnector finds something else"
    assert serve(recurrent, first, first[: 2 * block + 20] + prompt(603, 70), prompt(604, 90)) == [
        3 * block,
        2 * block,
        0,
    ]


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.campaign)])
@pytest.mark.timeout(3600)
def test_the_server_is_killed(recurrent: Rig, times: int) -> None:
    """At random moments of requests that load and save: no answer goes on from a state that was not there."""
    block = recurrent.ours.facts["block_size"]
    asked = [prompt(620 + seed, (1 + seed) * block + 40) for seed in range(3)]
    right = recurrent.right(*asked, max_tokens=MAX_TOKENS)
    source, hits = random.Random(6), 0
    for _ in range(times):
        began = time.monotonic()
        serve(recurrent, *asked)
        took = time.monotonic() - began
        recurrent.ours.wipe()
        recurrent.ours.begin(asked, MAX_TOKENS)
        time.sleep(source.uniform(0, took))  # a random moment of the run
        recurrent.server.kill()
        answers = recurrent.ours.finish()
        # A load that fails ends its request: vLLM-Ascend refuses to have it computed.
        assert all(answers[number].reason == "error" for number in right.wrong(answers))
        hits += sum(answer.cached > 0 for answer in answers)
        recurrent.server.restart()
        until(recurrent.server, lambda status: any(session["memory"] for session in status["sessions"]))
    if times > 2:
        assert hits > 0, "every kill came before the hits: the campaign proves nothing"
    serve(recurrent, *asked)
    assert serve(recurrent, *asked) == [(1 + seed) * block for seed in range(3)]


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.campaign)])
@pytest.mark.timeout(3600)
def test_aborts_and_preemption(recurrent: Rig, count: int) -> None:
    """More requests than the cache has room for; a third of them is aborted, before any step."""
    block = recurrent.ours.facts["block_size"]
    churn = Churn(count, 24, shared=range(1, 2 * block), aborted=count // 3, steps=3 * count, seed=count)
    churn.learn(recurrent.plain, rounds=recurrent.rounds)
    for _ in range(2):
        recurrent.ours.wipe()
        answers = churn.serve(recurrent.server, recurrent.ours)
    assert sum(answer.reason == "abort" for answer in answers) > 0
    assert sum(answer.cached for answer in answers) > 0

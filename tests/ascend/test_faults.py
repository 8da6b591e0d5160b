"""Kills, failed loads, aborts and preemption around vLLM-Ascend: tokens stay right, nothing leaks, and it goes on."""

from __future__ import annotations

import random
import time

import pytest
from ascend import BLOCK
from churn import Churn
from comparison import RECOVERY_S, prompt, settled, until
from conftest import Rig

MAX_TOKENS = 3
SHORT, LONG = 2, 50
"""How often each fault happens: in CI, and in the campaign."""

often = pytest.mark.parametrize("times", [SHORT, pytest.param(LONG, marks=pytest.mark.campaign)])


@often
@pytest.mark.timeout(3600)
def test_the_server_is_killed(rig: Rig, times: int) -> None:
    """At random moments of requests that load and save."""
    asked = [prompt(300 + seed, 150 + 90 * seed) for seed in range(4)]
    right = rig.right(*asked, max_tokens=MAX_TOKENS)
    source, hits = random.Random(5), 0
    for _ in range(times):
        began = time.monotonic()
        assert not right.wrong(rig.ours.generate(*asked, max_tokens=MAX_TOKENS))
        took = time.monotonic() - began
        rig.ours.wipe()
        settled(rig.server.endpoint)
        rig.ours.begin(asked, MAX_TOKENS)
        time.sleep(source.uniform(0, took))  # a random moment of the run
        rig.server.kill()
        answers = rig.ours.finish()
        assert not right.wrong(answers)
        hits += sum(answer.cached > 0 for answer in answers)
        rig.ours.wipe()
        rig.server.restart()
        until(rig.server, lambda status: any(session["memory"] for session in status["sessions"]))
    if times > SHORT:
        assert hits > 0, "every kill came before the hits: the campaign proves nothing"
    deadline = time.monotonic() + RECOVERY_S
    while rig.ours.one(asked[0], max_tokens=MAX_TOKENS).cached < len(asked[0]) - 1:
        assert time.monotonic() < deadline, "nothing is stored or found since the server came back"
        rig.ours.wipe()
        settled(rig.server.endpoint)


@often
@pytest.mark.timeout(3600)
def test_loads_of_running_steps_fail(rig: Rig, times: int) -> None:
    asked = [prompt(400 + seed, 290 + 20 * seed) for seed in range(3)]
    right = rig.right(*asked, max_tokens=MAX_TOKENS)
    rig.ours.generate(*asked, max_tokens=MAX_TOKENS)
    rig.ours.break_loads(0.5)
    rounds, failed = 0, rig.ours.failed_loads()
    try:
        while rounds < times:
            rig.ours.wipe()
            settled(rig.server.endpoint)
            assert not right.wrong(rig.ours.generate(*asked, max_tokens=MAX_TOKENS))
            before, failed = failed, rig.ours.failed_loads()
            rounds += failed > before
    finally:
        rig.ours.break_loads(0.0)
    for _ in range(2):  # objects of failed loads are hidden: a prompt may have to be stored anew
        rig.ours.wipe()
        settled(rig.server.endpoint)
        answer = rig.ours.one(asked[0], max_tokens=MAX_TOKENS)
    assert answer.cached == len(asked[0]) - 1


@pytest.mark.parametrize(
    ("count", "preempted"), [(16, 0), pytest.param(100, LONG, marks=pytest.mark.campaign)], ids=["few", "many"]
)
@pytest.mark.timeout(3600)
def test_aborts_and_preemption(rig: Rig, count: int, preempted: int) -> None:
    """More requests than the cache has room for; a third of them is aborted, before any step.

    :param preempted: it goes on until there were so many: a round has more of them where the machine loads slowly.
    """
    churn = Churn(count, 24, shared=range(1, 2 * BLOCK), aborted=count // 3, steps=3 * count, seed=count)
    churn.learn(rig.plain, rounds=rig.rounds)
    before = rig.ours.preemptions()
    rounds = 0
    while rounds < 2 or rig.ours.preemptions() - before < preempted:
        rig.ours.wipe()
        answers = churn.serve(rig.server, rig.ours)
        rounds += 1
    assert sum(answer.reason == "abort" for answer in answers) > 0
    assert sum(answer.cached for answer in answers) > 0

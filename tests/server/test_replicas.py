"""Ranks that hold the same heads store each object once, in turns, and each loads what any of them has stored."""

from __future__ import annotations

import itertools
from typing import Any

from e2e.known import KnownWorker, eventually, small_spec

from layerflow.agent import Control
from layerflow.agent.values import StepRequest
from layerflow.spec import Shard
from server.support import Embed, observe, worker_on

TOKENS = 200


def ranks_on(server: Any, heads: int, size: int) -> list[KnownWorker]:
    return [worker_on(server, spec=small_spec(shard=Shard(rank, size, heads=(heads,)))) for rank in range(size)]


def objects(control: Control) -> int:
    return int(control.status()["pool"]["objects"])


def test_latent_planes_are_stored_once(embed: Embed) -> None:
    server = embed()
    control = observe(server)
    ranks = ranks_on(server, 1, 4)
    chain = ranks[0].prompt(TOKENS)
    stored = [0]
    for rank in ranks:
        assert rank.serve(chain, look=False).hit.tokens == 0
        stored.append(objects(control))
    whole = -(-TOKENS // ranks[0].spec.chunk_tokens)
    assert stored[-1] == whole, "an object is missing, or stored twice"
    assert all(after - before < whole for before, after in itertools.pairwise(stored)), stored
    for rank in ranks:
        assert rank.serve(chain).hit.tokens == TOKENS - 1
        rank.agent.close()
    control.close()


def test_a_rank_whose_equals_are_gone_stores_all(embed: Embed) -> None:
    server = embed()
    control = observe(server)
    first, *others = ranks_on(server, 1, 3)
    for other in others:
        other.agent.close()
    assert eventually(lambda: sum(session["memory"] for session in control.status()["sessions"]) == 1)
    chain = first.prompt(TOKENS)
    first.serve(chain, look=False)
    assert first.serve(chain).hit.tokens == TOKENS - 1
    first.agent.close()
    control.close()


def test_equal_ranks_of_another_size_hit(embed: Embed) -> None:
    """What one worker has stored of a model without heads, two ranks hit, and the other way."""
    server = embed()
    for writers, readers in ((1, 2), (2, 1)):
        writing = ranks_on(server, 1, writers)
        chain = writing[0].prompt(TOKENS)
        for rank in writing:
            rank.serve(chain, look=False)
        for rank in writing:
            rank.agent.close()
        for rank in ranks_on(server, 1, readers):
            assert rank.serve(chain).hit.tokens == TOKENS - 1
            rank.agent.close()


def test_what_equal_ranks_load_stays_leased_for_the_last(embed: Embed) -> None:
    server = embed(pool__lease_ms=60_000)
    control = observe(server)
    ranks = ranks_on(server, 1, 2)
    chain = ranks[0].prompt(TOKENS)
    for rank in ranks:
        rank.serve(chain, look=False)
    run = ranks[0].admit(chain)
    with ranks[0].agent.open_step([run.request(save=False)]) as step:
        assert ranks[0].forward(step, [run]) == 0
    assert ranks[0].agent.wait_idle(run.name, 20)
    assert eventually(lambda: control.status()["flow"]["steps"] == 0)
    assert control.status()["pool"]["pinned"] == objects(control), "the second rank's step opens late"
    table = ranks[1].admit(chain, look=False).tables
    request = StepRequest(run.name, chain, table, (0, run.hit.tokens), run.hit, (0, 0))
    with ranks[1].agent.open_step([request]) as late:
        for layer in range(ranks[1].spec.num_layers):
            assert not late.wait_layer(layer).failed
            late.layer_done(layer)
    for rank in ranks:
        rank.agent.close()
    control.close()


def test_what_a_rank_does_not_store_in_its_turn_another_stores_next_time(embed: Embed) -> None:
    server = embed()
    control = observe(server)
    ranks = ranks_on(server, 1, 2)
    chain = ranks[0].prompt(TOKENS)
    whole = -(-TOKENS // ranks[0].spec.chunk_tokens)
    ranks[0].serve(chain, look=False)
    first = objects(control)
    assert 0 < first < whole, "the prompt needs chunks of both turns"
    run = ranks[1].admit(chain, look=False)
    with ranks[1].agent.open_step([run.request()]) as step:
        step.cancel_saves("its saves are given up")
        ranks[1].forward(step, [run])
    assert ranks[1].agent.wait_idle(run.name, 20)
    assert eventually(lambda: control.status()["pool"]["half_written"] == 0) and objects(control) == first
    ranks[0].serve(chain, look=False)
    assert objects(control) == whole
    assert ranks[1].serve(chain).hit.tokens == TOKENS - 1
    for rank in ranks:
        rank.agent.close()
    control.close()

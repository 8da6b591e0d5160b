"""Loads of what is no longer in the arena: all shapes of hits, every byte compared."""

from __future__ import annotations

import pytest
from backends.served.house import engine, objects_of, reload, save
from e2e.known import small_spec

LAYERS, CHUNK = 6, 16


@pytest.mark.parametrize(("mode", "window"), [("layerwise", 40), ("bulk", 0)])
def test_every_length_of_a_prompt_comes_back(kind, start, mode, window):
    served = start(kind, transfer__mode=mode)
    spec = small_spec(LAYERS, window=window)
    with engine(served, spec) as worker:
        chains = [worker.prompt(tokens) for tokens in (CHUNK, CHUNK + 1, 5 * CHUNK - 1, 5 * CHUNK, 5 * CHUNK + 7, 7)]
        save(worker, *chains)
        if kind.tiered:
            expected = sum(objects_of(spec, len(chain)) for chain in chains)
            assert served.wait(lambda tier: tier["written_objects"] == expected)["shed_objects"] == 0
        served.empty_arena()
        for chain in chains:
            [run] = reload(worker, [chain])
            assert run.hit.tokens == len(chain) - 1, "one token is left to compute"
        if kind.tiered:
            tier = served.tier
            assert tier["fetched_objects"] > 0 and not tier["failures"], tier


def test_prompts_that_share_a_beginning(kind, start):
    served = start(kind)
    with engine(served, small_spec(LAYERS)) as worker:
        first = worker.prompt(6 * CHUNK + 5)
        save(worker, first)
        inside, tail = worker.prompt(150, first, 3 * CHUNK + 2), worker.prompt(150, first, len(first))
        served.empty_arena()
        runs = reload(worker, [inside, tail])
        assert runs[0].hit.tokens == 3 * CHUNK
        assert runs[1].hit.tokens == len(first), "a server knows with which blocks the chunks begin that it wrote"


def test_several_requests_in_one_step_from_arena_and_tier(kind, start):
    served = start(kind)
    with engine(served, small_spec(LAYERS, window=40)) as worker:
        common = worker.prompt(8 * CHUNK)
        chains = [worker.prompt(100 + 9 * number, common, 20 * number) for number in range(6)]
        save(worker, common, *chains[:3])
        served.empty_arena()
        save(worker, *chains[3:])
        for _ in range(2):  # from both, then from the arena
            runs = reload(worker, [common, *chains])
            assert [run.hit.tokens for run in runs] == [len(run.chain) - 1 for run in runs]


def test_a_step_loads_and_saves(kind, start):
    served = start(kind)
    with engine(served, small_spec(LAYERS, window=40)) as worker:
        turns = [worker.prompt(30)]
        for _ in range(5):  # a conversation: each turn begins with all of the one before
            turns.append(worker.prompt(len(turns[-1]) + 37, turns[-1], len(turns[-1])))
        for number, turn in enumerate(turns):
            run = worker.serve(turn)
            assert run.hit.tokens >= (len(turns[number - 1]) // CHUNK * CHUNK if number else 0)
            served.empty_arena()
        reload(worker, turns)


def test_layers_of_several_slices(kind, start):
    served = start(kind, pool__size="64MiB")
    with engine(served, small_spec(16, block_size=16, chunk_tokens=64, row=1024), blocks=128) as worker:
        chain = worker.prompt(500)
        save(worker, chain)
        for _ in range(2):
            served.empty_arena()
            [run] = reload(worker, [chain])
            assert run.hit.tokens == 499


def test_a_prompt_that_is_given_up_and_asked_for_again(kind, start):
    served = start(kind)
    with engine(served, small_spec(LAYERS, window=40)) as worker:
        chain = worker.prompt(200)
        save(worker, chain)
        for number in range(10):
            served.empty_arena()
            assert worker.agent.lookup(f"given up {number}", chain).tokens == 199
            worker.agent.drop_lease(f"given up {number}")
            [run] = reload(worker, [chain])
            assert run.hit.tokens == 199, "its fetch had been called back"
        assert not kind.tiered or not served.tier["failures"], served.tier

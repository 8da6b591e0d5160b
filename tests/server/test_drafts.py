"""Draft layers in lookups, loads and hand-offs: loaded where they are, never needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from e2e.drafted import CHUNK, DRAFT_LAYER, LAYERS, drafted
from e2e.known import PATIENCE_S, POISON, KnownWorker, Run, eventually, step_of
from msgspec.structs import replace

from layerflow.agent import Control, Follow
from layerflow.agent.lookups import Lookups
from layerflow.keys import Chain
from layerflow.server.embedded import EmbeddedServer
from layerflow.spec import ModelSpec

TOKENS = 75  # four chunks of 16 and a tail of 11
PAIRS = [("one", "one", True), ("one", "", False), ("", "one", False), ("one", "other", False)]
"""Which draft models P and D have, and whether D loads its own."""

Start = Callable[[ModelSpec, str], KnownWorker]


@pytest.fixture
def server(embed: Callable[[], EmbeddedServer]) -> EmbeddedServer:
    return embed()


@pytest.fixture
def worker(server: EmbeddedServer) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(spec: ModelSpec, engine: str) -> KnownWorker:
            return stack.enter_context(KnownWorker(server.endpoint, spec, engine=engine, context=server.context))

        yield start


def same(worker: KnownWorker, chain: Chain) -> Chain:
    return worker.agent.chain(chain.tokens)


def assert_loaded(d: KnownWorker, run: Run, drafts: bool) -> None:
    """After the load and before anything is computed, every layer holds what a hit must, or nothing."""
    for layer in range(LAYERS):
        assert d.wrong_bytes(run, layer, 0, run.hit.tokens) == 0
    if d.spec.num_layers > LAYERS and drafts:
        assert d.wrong_bytes(run, DRAFT_LAYER, d.readable(run, DRAFT_LAYER), run.hit.tokens) == 0
    elif d.spec.num_layers > LAYERS:
        table = run.tables[1]
        assert (d.tensors[DRAFT_LAYER]["k"][table] == POISON).all(), "nothing may be written there"


def load(d: KnownWorker, run: Run, drafts: bool) -> bool:
    """Did the load begin by its hit's plan?"""
    with d.agent.open_step([run.request(save=False)]) as step:
        assert step.wait_all().ready
        assert_loaded(d, run, drafts)
        return step_of(step).residents is not None


@pytest.mark.parametrize(("p_has", "d_has", "drafts"), PAIRS)
def test_a_hit_is_the_models_own_whatever_the_draft_model(p_has: str, d_has: str, drafts: bool, worker: Start) -> None:
    p, d = worker(drafted(p_has), "P"), worker(drafted(d_has, row=32 if d_has != "other" else 64), "D")
    chain = p.prompt(TOKENS)
    p.serve(chain, look=False)
    run = d.admit(same(d, chain))
    assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, drafts)
    assert load(d, run, drafts), "what no hit needs, no plan needs"


def test_what_another_draft_model_lacks_is_stored_beside(worker: Start) -> None:
    """Once an engine with the same draft model has computed the prompt, the next one loads its layers too."""
    p, d, again = worker(drafted(), "P"), worker(drafted("one"), "D"), worker(drafted("one"), "E")
    chain = p.prompt(TOKENS)
    p.serve(chain, look=False)
    d.serve(same(d, chain), look=False)
    run = again.admit(same(again, chain))
    assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, True)
    assert load(again, run, True)


@pytest.mark.parametrize(
    ("shared", "drafts"),
    [(2 * CHUNK, True), (2 * CHUNK + 4, False), (2 * CHUNK + 12, False), (TOKENS - 1, True)],
)
def test_where_a_draft_models_window_keeps_less_of_a_chunk(shared: int, drafts: bool, worker: Start) -> None:
    """A hit may end at any block of the model's own layers; of the draft model's only a chunk's end is stored."""
    p, d = (worker(drafted("one", window=6), engine) for engine in "PD")
    chain = p.prompt(TOKENS)
    p.serve(chain, look=False)
    run = d.admit(same(d, p.prompt(TOKENS, chain, TOKENS if shared == TOKENS - 1 else shared)))
    assert run.hit.tokens == shared
    assert load(d, run, drafts)


def test_ranks_that_share_the_models_objects_have_draft_layers_each(worker: Start) -> None:
    """A plan tells of as many objects as there are draft layers. A hit without these is loaded as the server plans."""

    def ranks(engine: str, draft: str) -> list[KnownWorker]:
        spec = drafted(draft)
        shards = [replace(spec.shard, tp_rank=rank, tp_size=2) for rank in range(2)]
        return [worker(replace(spec, shard=shard), engine) for shard in shards]

    first, second, third = ranks("P", ""), ranks("D", "one"), ranks("E", "one")
    chain = first[0].prompt(TOKENS)
    for rank in first:
        rank.serve(same(rank, chain), look=False)
    for rank in second:
        run = rank.admit(same(rank, chain))
        assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, False)
        assert not load(rank, run, False)
    for rank in second:
        rank.serve(same(rank, chain), look=False)
    for rank in third:
        run = rank.admit(same(rank, chain))
        assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, True)
        assert load(rank, run, True)


@pytest.mark.parametrize("open_yet", [True, False], ids=["following", "complete"])
@pytest.mark.parametrize(("p_has", "d_has", "drafts"), PAIRS)
def test_a_hand_off_brings_draft_layers_to_those_that_have_them(
    p_has: str, d_has: str, drafts: bool, open_yet: bool, server: EmbeddedServer, worker: Start
) -> None:
    p, d = worker(drafted(p_has), "P"), worker(drafted(d_has), "D")
    chain = p.prompt(TOKENS)
    p_control = Control(server.endpoint, "P", p.spec, context=server.context, lookup_timeout_s=PATIENCE_S)
    lookups = Lookups(server.endpoint, "D", d.spec, context=server.context, timeout_s=PATIENCE_S)
    try:
        assert lookups.wait_connected(PATIENCE_S)
        assert p_control.open_handoff("h", chain, TOKENS)
        if not open_yet:
            p.serve(chain, look=False)
            p_control.end_handoff("h", tokens=TOKENS)
            assert p_control.watch_handoff("h", PATIENCE_S).state == "complete"
        mine = same(d, chain)
        hit = lookups.wait(lookups.ask("D-h", mine, Follow(time.monotonic() + 20, "h")), PATIENCE_S)
        assert hit is not None and (hit.tokens, hit.drafts, hit.reason) == (TOKENS - 1, drafts, "")
        assert (hit.plan is None) is open_yet, "what is still to be stored has no place yet"
        run = Run("D-h", mine, hit, d.admit(mine, look=False).tables)
        with d.agent.open_step([run.request(save=False)], 20.0) as step:
            assert (step_of(step).residents is None) is open_yet
            if open_yet:
                p.serve(chain, look=False)
                p_control.end_handoff("h", tokens=TOKENS)
            assert step.wait_all().ready
            assert_loaded(d, run, drafts)
        assert p_control.watch_handoff("h", PATIENCE_S).state == "complete"
        lookups.drop_lease("D-h")
        lookups.release_handoff("h")
        assert eventually(lambda: p_control.status()["pool"]["pinned"] == 0)
    finally:
        lookups.close()
        p_control.close()

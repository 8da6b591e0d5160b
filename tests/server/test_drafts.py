"""Draft layers in lookups, loads and hand-offs: loaded where they are, never needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from e2e.drafted import DRAFT_LAYER, LAYERS, drafted
from e2e.known import POISON, KnownWorker, Run, eventually

from layerflow.agent import Control, Follow
from layerflow.agent.connection.lookups import Lookups
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
        assert d.wrong_bytes(run, DRAFT_LAYER, 0, run.hit.tokens) == 0
    elif d.spec.num_layers > LAYERS:
        table = run.tables[1]
        assert (d.tensors[DRAFT_LAYER]["k"][table] == POISON).all(), "nothing may be written there"


def load(d: KnownWorker, run: Run, drafts: bool) -> None:
    with d.agent.open_step([run.request(save=False)]) as step:
        assert step.wait_all().ready
        assert_loaded(d, run, drafts)


@pytest.mark.parametrize(("p_has", "d_has", "drafts"), PAIRS)
def test_a_hit_is_the_models_own_whatever_the_draft_model(p_has: str, d_has: str, drafts: bool, worker: Start) -> None:
    p, d = worker(drafted(p_has), "P"), worker(drafted(d_has, row=32 if d_has != "other" else 64), "D")
    chain = p.prompt(TOKENS)
    p.serve(chain, look=False)
    run = d.admit(same(d, chain))
    assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, drafts)
    load(d, run, drafts)


def test_what_another_draft_model_lacks_is_stored_beside(worker: Start) -> None:
    """Once an engine with the same draft model has computed the prompt, the next one loads its layers too."""
    p, d, again = worker(drafted(), "P"), worker(drafted("one"), "D"), worker(drafted("one"), "E")
    chain = p.prompt(TOKENS)
    p.serve(chain, look=False)
    d.serve(same(d, chain), look=False)
    run = again.admit(same(again, chain))
    assert (run.hit.tokens, run.hit.drafts) == (TOKENS - 1, True)
    load(again, run, True)


@pytest.mark.parametrize("open_yet", [True, False], ids=["following", "complete"])
@pytest.mark.parametrize(("p_has", "d_has", "drafts"), PAIRS)
def test_a_hand_off_brings_draft_layers_to_those_that_have_them(
    p_has: str, d_has: str, drafts: bool, open_yet: bool, server: EmbeddedServer, worker: Start
) -> None:
    p, d = worker(drafted(p_has), "P"), worker(drafted(d_has), "D")
    chain = p.prompt(TOKENS)
    p_control = Control(server.endpoint, "P", p.spec, context=server.context, lookup_timeout_s=5.0)
    lookups = Lookups(server.endpoint, "D", d.spec, context=server.context, timeout_s=5.0)
    try:
        assert lookups.wait_connected(5)
        assert p_control.open_handoff("h", chain, TOKENS)
        if not open_yet:
            p.serve(chain, look=False)
            p_control.end_handoff("h", tokens=TOKENS)
            assert p_control.watch_handoff("h", 5.0).state == "complete"
        mine = same(d, chain)
        hit = lookups.wait(lookups.ask("D-h", mine, Follow(time.monotonic() + 20, "h")), 5.0)
        assert hit is not None and (hit.tokens, hit.drafts, hit.reason) == (TOKENS - 1, drafts, "")
        run = Run("D-h", mine, hit, d.admit(mine, look=False).tables)
        with d.agent.open_step([run.request(save=False)], 20.0) as step:
            if open_yet:
                p.serve(chain, look=False)
                p_control.end_handoff("h", tokens=TOKENS)
            assert step.wait_all().ready
            assert_loaded(d, run, drafts)
        assert p_control.watch_handoff("h", 5.0).state == "complete"
        lookups.drop_lease("D-h")
        lookups.release_handoff("h")
        assert eventually(lambda: p_control.status()["pool"]["pinned"] == 0)
    finally:
        lookups.close()
        p_control.close()

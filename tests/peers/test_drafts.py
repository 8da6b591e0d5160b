"""Between servers: draft layers cross the link to engines that have the same draft model."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from e2e.drafted import DRAFT_LAYER, LAYERS, drafted
from e2e.known import POISON, KnownWorker, Run, eventually

from layerflow.agent import Control, Follow
from layerflow.agent.lookups import Lookups
from peers.conftest import Pair

TOKENS = 75


@pytest.mark.parametrize(("p_has", "d_has"), [("one", "one"), ("one", ""), ("", "one"), ("one", "other")])
def test_a_hand_off_of_another_server(pair: Callable[..., Pair], p_has: str, d_has: str) -> None:
    two, drafts = pair(), p_has == d_has
    with (
        KnownWorker(two.owner.endpoint, drafted(p_has), engine="p") as p,
        KnownWorker(two.reader.endpoint, drafted(d_has), engine="d") as d,
    ):
        control = Control(two.owner.endpoint, "p", p.spec, lookup_timeout_s=5.0)
        lookups = Lookups(two.reader.endpoint, "d", d.spec, timeout_s=5.0)
        assert lookups.wait_connected(5)
        chain = p.prompt(TOKENS)
        assert control.open_handoff("h", chain, TOKENS)
        mine = d.agent.chain(chain.tokens)
        servers = (two.owner.endpoint,)
        hit = lookups.wait(lookups.ask("D-h", mine, Follow(time.monotonic() + 20, "h", servers)), 10.0)
        assert hit is not None and (hit.tokens, hit.drafts, hit.reason) == (TOKENS - 1, drafts, "")
        run = Run("D-h", mine, hit, d.admit(mine, look=False).tables)
        with d.agent.open_step([run.request(save=False)], 20.0) as step:
            p.serve(chain, look=False)
            control.end_handoff("h", tokens=TOKENS)
            assert step.wait_all().ready
            for layer in range(LAYERS + drafts):
                assert d.wrong_bytes(run, layer, 0, hit.tokens) == 0
            if d_has and not drafts:
                assert (d.tensors[DRAFT_LAYER]["k"][run.tables[1]] == POISON).all()
        lookups.drop_lease("D-h")
        lookups.release_handoff("h", servers)
        assert eventually(two.settled), (two.lends, two.reads)
        lookups.close()
        control.close()

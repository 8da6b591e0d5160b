"""What one server has stored, an engine at another one loads: every byte compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e.known import KnownWorker, eventually, small_spec

from peers.conftest import LINKS, Pair

pytestmark = pytest.mark.parametrize("link", LINKS)
TOKENS = 150


@pytest.mark.parametrize("window", [0, 32])
def test_what_a_peer_has_hits(pair: Callable[..., Pair], window: int) -> None:
    # What lies outside of a window is leased and never read, until the lease runs out.
    brief = {"peers.lease_ms": 6_000}
    two = pair(owner=brief, reader=brief)
    spec = small_spec(4, window=window)
    with two.workers(spec) as (p, d):
        chain = p.prompt(TOKENS)
        assert p.serve(chain).hit.tokens == 0
        run = d.serve(d.agent.chain(chain.tokens))
        assert run.hit.tokens == TOKENS - 1
        reads = two.reads
        assert reads["fetched_objects"] > TOKENS // 16 and not reads["failures"]
        # The second time all of it lies in its own arena.
        fetched = reads["fetched_objects"]
        assert d.serve(d.agent.chain(chain.tokens)).hit.tokens == TOKENS - 1
        assert two.reads["fetched_objects"] == fetched
        assert eventually(two.settled), (two.lends, two.reads)


def test_a_model_that_differs_is_named_by_its_first_fact(pair: Callable[..., Pair]) -> None:
    two = pair()
    with (
        KnownWorker(two.owner.endpoint, small_spec(4, chunk_tokens=16), engine="p") as p,
        KnownWorker(two.reader.endpoint, small_spec(4, chunk_tokens=32), engine="d") as d,
    ):
        chain = p.prompt(TOKENS)
        p.serve(chain)
        assert d.serve(d.agent.chain(chain.tokens)).hit.tokens == 0
        assert eventually(lambda: two.reads["peers"][0]["differs"])
        assert two.reads["peers"][0]["differs"] == {"known": "chunk_tokens: 32 here, 16 there"}

"""Requests that wait with hits on everything that is stored leave room for what is computed meanwhile."""

from __future__ import annotations

import pytest
from e2e.known import eventually, small_spec

from server.support import Embed, observe, worker_on

TOKENS = 256


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_saves_go_on_while_requests_wait_with_hits_on_all_there_is(embed: Embed, share: float) -> None:
    server = embed(pool__size="1MiB", pool__lease_share=share, pool__lease_ms=600_000)
    control = observe(server)
    # A lookup that a busy machine makes late would turn all of the next second into misses.
    with worker_on(server, spec=small_spec(4), lookup_timeout_s=30.0) as worker:
        stored = []
        while not control.status()["pool"]["evictions"]:
            stored.append(worker.prompt(TOKENS))
            worker.serve(stored[-1])
        waiting = 0
        for name in range(1000):
            waiting += worker.agent.lookup(f"waits-{name}", stored[-1 - name % len(stored)]).tokens > 0
        assert waiting > 900, "nearly everything was stored"
        pool = control.status()["pool"]
        assert (pool["pinned"] < 0.6 * pool["objects"]) is (share == 0.5)
        new = worker.prompt(TOKENS)
        worker.serve(new)
        found = worker.agent.lookup("new", new).tokens
        assert found == (TOKENS - 1 if share == 0.5 else 0)
        for name in range(1000):
            worker.agent.drop_lease(f"waits-{name}")
        worker.agent.drop_lease("new")
        worker.serve(worker.prompt(TOKENS))
        assert eventually(lambda: control.status()["pool"]["pinned"] == 0), "leases are left"
    control.close()

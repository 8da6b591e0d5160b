"""layerflow with memcache behind it, while its MetaService or the host between them dies. CANN emulated: no NPU.

The short form of the latter is in served/test_served_faults.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from backends.served.kinds import MIB, Memcache
from e2e.host_faults import ARENA, PAST_S, kill_hosts
from e2e.known import eventually
from e2e.rounds import record, rounds
from e2e.traffic import Load, load

from layerflow_cli.bench.harness import ServerProcess

KILLS = 50
ROOMY, SCARCE = 192 * MIB, 24 * MIB
"""Of the pool: it keeps everything, or evicts all the time."""
LOOKED_S = 5.0
"""So long the load goes on after the MetaService is back, at most until saves reach the pool again."""
Serve = Callable[..., ServerProcess]


@pytest.fixture
def served(serve: Serve) -> Callable[[Memcache], ServerProcess]:
    """A server with that behind it."""

    def start(kind: Memcache) -> ServerProcess:
        kind.open()
        return serve(pool__size=ARENA, **{key.replace(".", "__"): value for key, value in kind.settings().items()})

    return start


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_killed_host(served: Callable[[Memcache], ServerProcess]) -> None:
    kind = Memcache(ROOMY)
    try:
        kill_hosts(served(kind), KILLS, "memcache")
    finally:
        kind.close()


@rounds(2, 30)
def test_a_killed_meta_service(served: Callable[[Memcache], ServerProcess], rounds: int) -> None:
    """Every byte is right, and who uses the arena notices nothing; whatever the pool is worth afterwards.

    Who gives the memory tells the new MetaService what was in it, as of a moment before: also what had just been
    evicted, and whose room others were writing to. Each in a pool of its own, because not every one is usable again:
    of calls that were under way some come back after the library's minute only.
    """
    resumed = []
    for _ in range(rounds):
        kind = Memcache(SCARCE)
        try:
            server = served(kind)
            with load(server.endpoint, step_timeout_s=2.0) as it:
                resumed.append(kill_meta_service(kind, it))
            assert max(it.busy.counts.worst_past, it.steady.counts.worst_past) < PAST_S
            server.kill()
        finally:
            kind.close()
    quick = sorted(seconds for seconds in resumed if seconds is not None)
    record(
        "memcache_meta_killed",
        kills=rounds,
        resumed=len(quick),
        median_resumed_s=round(quick[len(quick) // 2], 3) if quick else None,
    )


def kill_meta_service(kind: Memcache, it: Load) -> float | None:
    """At a random moment; another one starts at once. How long until saves reach the pool; None = not while looked."""
    it.flows()
    it.random_moment()
    kind.cut()
    written = it.tier()["written_objects"]
    kind.mend()
    back = time.monotonic()
    resumed = eventually(lambda: it.tier()["written_objects"] > written, LOOKED_S, 0.01)
    took = time.monotonic() - back
    assert it.busy.more(20)
    assert it.steady.more(20)
    it.undisturbed()
    return took if resumed else None

"""layerflow with memcache behind it, while its MetaService or the host between them dies. CANN emulated: no NPU.

The short form of the latter is in served/test_served_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from backends.served.kinds import MIB, Memcache
from e2e.host_faults import ARENA, kill_hosts
from e2e.outages import outages
from e2e.rounds import rounds
from e2e.traffic import load

from layerflow_cli.bench.harness import ServerProcess

KILLS = 50
RESUME_S = 10.0
"""The library connects again every two seconds, and may not succeed at once; it is not a matter of a minute."""
HANGS_S = 25.0
"""Longer than three native calls may take, after which a lookup or check would count as hung."""
ROOMY, SCARCE = 192 * MIB, 24 * MIB
"""Of the pool: it keeps everything, or evicts all the time."""
Serve = Callable[..., ServerProcess]


@pytest.fixture
def memcache(request: pytest.FixtureRequest) -> Iterator[Memcache]:
    """Of the test's size."""
    kind = Memcache(request.param)
    try:
        kind.open()
        yield kind
    finally:
        kind.close()


def settings(memcache: Memcache) -> dict[str, object]:
    return {"pool__size": ARENA} | {key.replace(".", "__"): value for key, value in memcache.settings().items()}


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("memcache", [ROOMY], indirect=True)
def test_a_killed_host(serve: Serve, memcache: Memcache) -> None:
    kill_hosts(serve(**settings(memcache)), KILLS, "memcache")


@rounds(3, 50)
@pytest.mark.parametrize("memcache", [SCARCE], indirect=True)
def test_a_meta_service_that_is_back_at_once(serve: Serve, memcache: Memcache, rounds: int) -> None:
    """Who gives the memory tells the new one what was in it, as of a moment before: also what had just been evicted."""
    outages(serve(**settings(memcache)), (memcache.cut, memcache.mend), rounds, 0.0, "memcache_meta_at_once", RESUME_S)


@pytest.mark.parametrize("memcache", [SCARCE], indirect=True)
@pytest.mark.parametrize("away_s", [5.0, pytest.param(60.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])])
def test_a_meta_service_that_is_away(serve: Serve, memcache: Memcache, away_s: float) -> None:
    outages(serve(**settings(memcache)), (memcache.cut, memcache.mend), 1, away_s, "memcache_meta_away", RESUME_S)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("memcache", [ROOMY], indirect=True)
def test_a_meta_service_that_hangs_costs_no_host(serve: Serve, memcache: Memcache) -> None:
    """With its host a node's memory would leave the pool: of all nodes at the same time."""
    server = serve(**settings(memcache) | {"pool__memcache__dram_size": 64 * MIB})
    hang = (memcache.meta.pause, memcache.meta.resume)
    outages(server, hang, 1, HANGS_S, "memcache_meta_hangs", RESUME_S)
    with load(server.endpoint) as it:
        assert it.tier()["restarts"] == 0

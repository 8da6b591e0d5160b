"""layerflow with memcache behind it, while the host between them is killed. CANN emulated: no NPU takes part.

The short form is in served/test_served_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from backends.served.kinds import MIB, Memcache
from e2e.host_faults import ARENA, kill_hosts

from layerflow_cli.bench.harness import ServerProcess

KILLS = 50


@pytest.fixture
def memcache() -> Iterator[Memcache]:
    kind = Memcache(192 * MIB)
    try:
        kind.open()
        yield kind
    finally:
        kind.close()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_killed_host(serve: Callable[..., ServerProcess], memcache: Memcache) -> None:
    settings = {key.replace(".", "__"): value for key, value in memcache.settings().items()}
    kill_hosts(serve(pool__size=ARENA, **settings), KILLS, "memcache")

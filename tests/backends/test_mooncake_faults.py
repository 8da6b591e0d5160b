"""layerflow with Mooncake behind it, while its master or the host process between them dies, stops or is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.host_faults import ARENA, arrive_later, kill_hosts, stop_host
from e2e.outages import outages
from e2e.rounds import record, rounds
from mooncake_master import MooncakeMaster
from mooncake_owner import Owner

from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports

SEGMENT = 192 << 20
RESUME_S = 5.0
Serve = Callable[..., ServerProcess]


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster(default_kv_lease_ttl=3000) as master:
        yield master


@pytest.fixture
def owner(master: MooncakeMaster) -> Iterator[Owner]:
    """Who gives the pool its memory, beside the server."""
    options = {"master": master.address, "metrics": master.url, "segment_size": SEGMENT}
    with Owner(**options) as owner:
        yield owner


def settings(master: MooncakeMaster, segment: int = 0) -> dict[str, object]:
    return {
        "pool__backend": "mooncake",
        "pool__size": ARENA,
        "pool__mooncake__master": master.address,
        "pool__mooncake__metrics": master.url,
        "pool__mooncake__segment_size": segment,
    }


@rounds(5, 50)
def test_a_killed_host(serve: Serve, master: MooncakeMaster, owner: Owner, rounds: int) -> None:
    kill_hosts(serve(**settings(master)), rounds, "mooncake")


@pytest.mark.parametrize(
    ("stops", "watched_s"), [(1, 4.0), pytest.param(3, 10.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])]
)
def test_a_stopped_host(
    serve: Serve,
    master: MooncakeMaster,
    owner: Owner,
    stops: int,
    watched_s: float,
) -> None:
    stop_host(serve(**settings(master)), stops, watched_s, "mooncake")


@pytest.mark.parametrize(
    ("away_s", "segment"),
    [
        pytest.param(6.0, 0, id="short"),
        pytest.param(60.0, 0, id="long", marks=[pytest.mark.campaign, pytest.mark.timeout(600)]),
        pytest.param(60.0, SEGMENT, id="long-own", marks=[pytest.mark.campaign, pytest.mark.timeout(600)]),
    ],
)
def test_a_master_that_is_away(
    serve: Serve,
    master: MooncakeMaster,
    request: pytest.FixtureRequest,
    away_s: float,
    segment: int,
) -> None:
    """:param segment: memory that the server's own host gives to the pool; 0 = somebody else does."""
    if not segment:
        request.getfixturevalue("owner")
    name = "mooncake_master_own_segment" if segment else "mooncake_master_pure_client"
    outages(serve(**settings(master, segment)), (master.kill, master.start), 1, away_s, name, RESUME_S)


@rounds(2, 20)
def test_a_master_that_is_back_at_once(
    serve: Serve,
    master: MooncakeMaster,
    owner: Owner,
    rounds: int,
) -> None:
    outages(serve(**settings(master)), (master.kill, master.start), rounds, 0.0, "mooncake_master_at_once", RESUME_S)


@pytest.mark.parametrize("away_s", [3.0, pytest.param(30.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])])
def test_a_master_that_hangs(serve: Serve, master: MooncakeMaster, owner: Owner, away_s: float) -> None:
    outages(serve(**settings(master)), (master.pause, master.resume), 1, away_s, "mooncake_master_hangs", RESUME_S)


def test_a_master_that_comes_later(serve: Serve, master: MooncakeMaster) -> None:
    master.kill()
    [port] = held_ports(1)
    server = serve(**settings(master, SEGMENT), server__http_port=port)
    took = arrive_later(server, port, master.address, master.start, 30)
    record("mooncake_comes_later", attached_s=round(took, 3))

"""layerflow with Mooncake behind it, while its master or the host process between them dies, stops or is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from e2e.host_faults import ARENA, PAST_S, arrive_later, assert_rest, free_port, kill_hosts, open_files, stop_host
from e2e.known import eventually
from e2e.rounds import record, rounds
from e2e.traffic import load
from mooncake_master import MooncakeMaster
from mooncake_owner import Owner

from layerflow_cli.bench.harness import ServerProcess

SEGMENT = 192 << 20
RESUME_S = 5.0
"""Saves reach the pool so soon after its master answers again."""
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
    name = "own_segment" if segment else "pure_client"
    outages(serve(**settings(master, segment)), (master.kill, master.start), 1, away_s, name)


@rounds(2, 20)
def test_a_master_that_is_back_at_once(
    serve: Serve,
    master: MooncakeMaster,
    owner: Owner,
    rounds: int,
) -> None:
    outages(serve(**settings(master)), (master.kill, master.start), rounds, 0.0, "at_once")


@pytest.mark.parametrize("away_s", [3.0, pytest.param(30.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])])
def test_a_master_that_hangs(serve: Serve, master: MooncakeMaster, owner: Owner, away_s: float) -> None:
    outages(serve(**settings(master)), (master.pause, master.resume), 1, away_s, "hangs")


def outages(
    server: ServerProcess,
    fault: tuple[Callable[[], None], Callable[[], None]],
    rounds: int,
    away_s: float,
    name: str,
) -> None:
    """The master goes away under load and is back `away_s` later.

    :param fault: how it goes and how it comes back; the latter returns when it answers.
    """
    go, come = fault
    resumed: list[float] = []
    noticed: list[float] = []
    served = 0
    with load(server.endpoint, step_timeout_s=2.0) as it:
        assert eventually(it.up, 30, 0.02), it.tier()
        first = open_files(server)
        for _ in range(rounds):
            it.flows()
            it.random_moment()
            go()
            killed = time.monotonic()
            if away_s:
                assert eventually(lambda: not it.up(), 10, 0.01), it.tier()
                noticed.append(time.monotonic() - killed)
                assert it.tier()["reason"]
                before = (it.steady.counts.hits, it.busy.counts.passes)
                assert not eventually(it.up, away_s + killed - time.monotonic(), 0.1), "without a master?"
                assert it.steady.counts.hits > before[0] and it.busy.counts.passes > before[1]
                served += it.busy.counts.passes - before[1]
            written = it.tier()["written_objects"]
            come()
            healthy = time.monotonic()
            assert eventually(lambda before=written: it.tier()["written_objects"] > before, 30, 0.01), it.tier()
            resumed.append(time.monotonic() - healthy)
            it.undisturbed()
        it.flows()
        it.undisturbed()
        tier = it.tier()
    busy, steady = it.busy.counts, it.steady.counts
    record(
        f"mooncake_master_{name}",
        times=rounds,
        away_s=away_s,
        worst_resumed_s=round(max(resumed), 3),
        worst_noticed_s=round(max(noticed, default=0.0), 3),
        served_meanwhile=served,
        host_restarts=tier["restarts"],
        lost=tier["failures"],
        busy=vars(busy),
        steady=vars(steady),
    )
    assert server.process.poll() is None
    assert_rest(server, first)
    assert max(busy.worst_past, steady.worst_past) < PAST_S
    assert max(resumed) < RESUME_S, resumed


def test_a_master_that_comes_later(serve: Serve, master: MooncakeMaster) -> None:
    master.kill()
    port = free_port()
    server = serve(**settings(master, SEGMENT), server__http_port=port)
    took = arrive_later(server, port, master.address, master.start, 30)
    record("mooncake_comes_later", attached_s=round(took, 3))

"""What the process behind the server asks goes away under load and comes back: the campaign of every pool's service."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.host_faults import assert_rest, open_files
from e2e.known import eventually
from e2e.rounds import record
from e2e.traffic import load
from layerflow_cli.bench.harness import ServerProcess


def outages(
    server: ServerProcess,
    fault: tuple[Callable[[], None], Callable[[], None]],
    rounds: int,
    away_s: float,
    name: str,
    resume_s: float,
) -> None:
    """It goes away under load and is back `away_s` later.

    :param fault: how it goes and how it comes back; the latter returns when it answers.
    :param away_s: 0 = it may not even be noticed.
    :param resume_s: saves reach the pool so soon after it answers again.
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
                assert not eventually(it.up, away_s + killed - time.monotonic(), 0.1), "without it?"
                assert it.steady.counts.hits > before[0] and it.busy.counts.passes > before[1]
                served += it.busy.counts.passes - before[1]
            come()
            healthy = time.monotonic()
            written = it.tier()["written_objects"]
            assert eventually(lambda before=written: it.tier()["written_objects"] > before, 30, 0.01), it.tier()
            resumed.append(time.monotonic() - healthy)
            it.undisturbed()
        it.flows()
        it.undisturbed()
        tier = it.tier()
    busy, steady = it.busy.counts, it.steady.counts
    record(
        name,
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
    assert max(resumed) < resume_s, resumed

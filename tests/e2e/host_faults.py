"""What may happen to the process behind the server, under load: the campaigns that every backend goes through."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from e2e.known import KnownWorker, eventually
from e2e.rounds import record
from e2e.stopping import go_on, left_over, stop
from e2e.traffic import FETCH_S, PROMPT_BYTES, Load, load
from layerflow.agent import Control
from layerflow_cli.bench.harness import ServerProcess

ARENA = 12 * PROMPT_BYTES
MOST = 4
"""So many times the wanted kills at most, until one has hit a transfer: a few may all fall between two."""


def kill_hosts(server: ServerProcess, rounds: int, name: str, **how: Any) -> None:
    """kill -9 of the host at random moments under load.

    :param how: of the :class:`Load`.
    """
    back: list[float] = []
    with load(server.endpoint, **how) as it:
        assert eventually(it.up, 30, 0.02), it.tier()
        first = open_files(server)
        while len(back) < rounds or (not it.tier()["failures"] and len(back) < MOST * rounds):
            it.flows()
            pid = it.tier()["host"]["pid"]
            it.random_moment()
            back.append(kill_host(it, pid))
            it.undisturbed()
        it.flows()
        it.undisturbed()
        tier = it.tier()
    busy, steady = it.busy.counts, it.steady.counts
    record(
        f"host_killed_{name}",
        kills=len(back),
        worst_back_s=round(max(back), 3),
        median_back_s=round(sorted(back)[len(back) // 2], 3),
        lost=tier["failures"],
        busy=vars(busy),
        steady=vars(steady),
    )
    assert tier["restarts"] == len(back)
    assert tier["failures"], "no kill hit a transfer: the campaign has shown nothing"
    died = busy.failed - busy.late  # the others were late on a busy machine
    assert not died or tier["failures"].get("fetch_failed"), "loads that died with their host are not counted"
    assert busy.hits > rounds and steady.hits > rounds
    assert_rest(server, first)


def kill_host(it: Load, pid: int) -> float:
    """Until there is another that is up, in seconds."""
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    def back() -> bool:
        tier = it.tier()
        return bool(tier["up"]) and tier["host"]["pid"] not in (0, pid)

    assert eventually(back, 30, 0.005), it.tier()
    return time.monotonic() - began


def stop_host(server: ServerProcess, rounds: int, watched_s: float, name: str) -> None:
    """SIGSTOP of the host under load: it is killed and replaced, and nothing of it writes late.

    :param watched_s: the load goes on for so long after each stop.
    """
    never = threading.Event()
    replaced: list[float] = []
    with load(server.endpoint, step_timeout_s=0.8) as it:
        assert eventually(it.up, 30, 0.02), it.tier()
        first = open_files(server)
        for _ in range(rounds):
            it.flows()
            pid = it.tier()["host"]["pid"]
            began = stop_in_mid_fetch(it, pid)
            passes = it.steady.counts.passes
            assert eventually(lambda pid=pid: it.tier()["host"]["pid"] != pid, 30, 0.02), "the host was not killed"
            # Of these one may have begun before; every pass loads, and one that waited for the host would be the last.
            assert it.steady.counts.passes >= passes + 3, "loads from the arena waited for the stopped host"
            assert not os.path.exists(f"/proc/{pid}"), "the stopped host lives on beside its successor"
            assert eventually(it.up, 30, 0.02), it.tier()
            replaced.append(time.monotonic() - began)
            never.wait(max(0.0, began + watched_s - time.monotonic()))  # late writes would come now
            it.undisturbed()
        it.flows()
    busy, steady = it.busy.counts, it.steady.counts
    record(
        f"host_stopped_{name}",
        stops=rounds,
        watched_s=watched_s,
        worst_replaced_s=round(max(replaced), 3),
        busy=vars(busy),
        steady=vars(steady),
    )
    assert busy.watched, "no load failed: the campaign has shown nothing"
    assert_rest(server, first)


def stop_in_mid_fetch(it: Load, pid: int) -> float:
    """SIGSTOP while it brings something that steps may wait for; when that was, on the monotonic clock."""
    pause = threading.Event()
    while True:
        it.soon_after(it.busy.hit, FETCH_S)
        stop(pid)
        began = time.monotonic()
        if left_over(it.tier):
            return began
        go_on(pid)
        pause.wait(0.1)


def arrive_later(
    server: ServerProcess, http_port: int, reason: str, arrive: Callable[[], None], attach_s: float
) -> float:
    """The server starts without what lies behind it, serves all the same, says so, and uses it when it is there.

    :param reason: part of what the server says is wrong meanwhile.
    :param arrive: make it appear.
    :returns: seconds from its appearance until it was used.
    """
    control = Control(server.endpoint, "observer")

    def tier() -> dict[str, Any]:
        found: dict[str, Any] = control.status(10)["tier"]
        return found

    with KnownWorker(server.endpoint) as worker:
        assert eventually(lambda: reason in tier()["reason"], 60, 0.05), tier()
        assert not tier()["up"]
        assert "layerflow_tier_up 0.0" in get(http_port, "/metrics").splitlines()
        assert get(http_port, "/healthz")
        early = worker.prompt(64)
        worker.serve(early)
        assert worker.serve(early).hit.tokens == 63, "the arena does not serve alone"
        arrive()
        began = time.monotonic()
        assert eventually(lambda: tier()["up"], attach_s, 0.01), tier()
        took = time.monotonic() - began
        assert eventually(lambda: "layerflow_tier_up 1.0" in get(http_port, "/metrics").splitlines(), every_s=0.1)
        assert tier()["reason"] == ""
        late = worker.prompt(64)
        worker.serve(late)
        assert eventually(lambda: tier()["written_objects"] == 4, every_s=0.02), tier()
        control.purge()
        assert worker.serve(late).hit.tokens == 63
        assert tier()["fetched_objects"] == 4
        assert worker.serve(early).hit.tokens == 0, "it was saved when there was nothing to write it to"
        assert worker.agent.statistics().attachments == 1
    control.close()
    return took


def get(port: int, path: str) -> str:
    """What the server says over HTTP; empty = not that all is well."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.read().decode() if answer.status == http.HTTPStatus.OK else ""
    finally:
        asked.close()


def assert_rest(server: ServerProcess, files: int) -> None:
    """Once the load has ended nothing is left of it, in the server's books or among its descriptors.

    :param files: descriptors that it had when the load had begun.
    """
    control = Control(server.endpoint, "afterwards")
    seen: dict[str, Any] = {}

    def rests() -> bool:
        status = control.status(10)
        tier, pool = status["tier"], status["pool"]
        seen.update(
            {name: tier[name] for name in ("fetching_jobs", "writing_jobs", "backlog_bytes")},
            half_written=pool["half_written"],
            pinned=pool["pinned"],
            more_files=max(0, open_files(server) - files),
        )
        return not any(seen.values())

    try:
        assert eventually(rests, 60, 0.05), seen
    finally:
        control.close()


def open_files(server: ServerProcess) -> int:
    """Descriptors of the server's process."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))

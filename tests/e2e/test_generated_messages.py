"""Generated control messages over several connections: the server lives, keeps nothing, and serves others meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from e2e.children import Child
from e2e.generated import KINDS, SKIPPED, flood
from e2e.known import KnownWorker, eventually, small_spec
from e2e.rounds import record
from e2e.test_bad_messages import refused, resident_bytes
from layerflow.agent import Control
from layerflow_cli.bench.harness import ServerProcess

CONNECTIONS = 4
GROWTH_BYTES = 48 << 20
QUIET_LOOKUPS = 300


class Bystander:
    """Another engine's scheduler, which looks a stored prompt up, 200 times a second."""

    def __init__(self, worker: KnownWorker, endpoint: str) -> None:
        # A lookup that a loaded machine answers late is late, and no miss.
        self._control = Control(endpoint, "bystander", spec=worker.agent.spec, lookup_timeout_s=60)
        self._chain = worker.prompt(900)
        worker.serve(self._chain)
        self.seconds: list[float] = []
        self.missed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            began = time.perf_counter()
            hit = self._control.lookup("leased-all-the-time", self._chain)
            self.seconds.append(time.perf_counter() - began)
            self.missed += hit.tokens != 899

    def taken(self) -> list[float]:
        """The lookups since the last call, seconds each."""
        seconds, self.seconds = self.seconds, []
        return seconds

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._control.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield own
    own.destroy(linger=0)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(8_000, marks=pytest.mark.timeout(400)),
        pytest.param(1_000_000, marks=[pytest.mark.campaign, pytest.mark.timeout(1200)]),
    ],
)
def test_generated_messages(
    serve: Callable[..., ServerProcess], context: zmq.Context[zmq.Socket[bytes]], messages: int
) -> None:
    server, measured = serve(log__level="error"), messages >= 1_000_000
    pid = server.process.pid
    control = Control(server.endpoint, "observer", context=context)
    with KnownWorker(server.endpoint, small_spec(), blocks=512, engine="bystander") as worker:
        bystander = Bystander(worker, server.endpoint)
        try:
            assert eventually(lambda: len(bystander.seconds) >= QUIET_LOOKUPS, 60)
            quiet = bystander.taken()
            # What a server keeps for the first messages of each kind is no leak.
            _in_parallel(server.endpoint, 4000, measured)
            assert eventually(lambda: _engines(control) == ["bystander"], 30)
            rss, fds = resident_bytes(pid), descriptors(pid)
            before, began = refused(control), time.monotonic()
            bystander.taken()
            kinds = _in_parallel(server.endpoint, messages, measured)
            seconds, during = time.monotonic() - began, bystander.taken()
        finally:
            bystander.close()
        assert eventually(lambda: _engines(control) == ["bystander"], 30), control.status()["sessions"]
        assert eventually(lambda: control.status()["flow"]["steps"] == 0, 30)
        status = control.status()
        assert status["pool"]["half_written"] == 0
        assert status["flow"]["load_inflight_bytes"] == status["flow"]["save_inflight_bytes"] == 0
        assert eventually(lambda: descriptors(pid) <= fds), (fds, descriptors(pid))
        grown = resident_bytes(pid) - rss
        p95, calm = float(np.percentile(during, 95)), float(np.percentile(quiet, 95))
        record(
            "generated_messages",
            sent=messages,
            seconds=round(seconds, 1),
            refused=refused(control) - before,
            rss_before=rss,
            rss_grown=grown,
            fds=[fds, descriptors(pid)],
            lookups=len(during),
            missed=bystander.missed,
            loop_lag_max_ms=round(status["figures"]["loop_lag_max_seconds"] * 1e3, 1),
            lookup_max_ms=round(max(during) * 1e3, 3),
            lookup_p95_ms=round(p95 * 1e3, 3),
            quiet_lookup_p95_ms=round(calm * 1e3, 3),
        )
    assert server.process.poll() is None
    assert kinds == {kind.__name__ for kind in KINDS if kind not in SKIPPED}, "some kind of message was never sent"
    assert refused(control) - before > messages / 10
    assert grown < GROWTH_BYTES
    assert bystander.missed == 0, "another engine's lookup missed a stored and leased prompt"
    if measured:
        assert seconds < 600
        assert p95 <= max(2 * calm, 0.005)
    control.close()


def _engines(control: Control) -> list[str]:
    return [session["engine"] for session in control.status()["sessions"] if session["memory"]]


def _in_parallel(endpoint: str, messages: int, gives_way: bool) -> set[str]:
    """Each connection from a process of its own; the names of the kinds that were sent."""
    each = messages // CONNECTIONS
    children = [Child(flood, endpoint, seed, each, gives_way) for seed in range(10, 10 + CONNECTIONS)]
    try:
        return {kind for child in children for kind in child.hear(1000)}
    finally:
        for child in children:
            child.close()

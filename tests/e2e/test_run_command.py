"""`layerflow run` as an operator sees it: start, idle, changes of its file, SIGTERM."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.known import PATIENCE_S, KnownWorker, eventually, small_spec, step_of
from e2e.rounds import record
from layerflow.agent import Control
from layerflow_cli.bench.harness import START_LINE, ServerProcess

STARTED_S = 120.0
"""How long the first line of a process may take on a busy machine."""


class Run:
    """A ``layerflow run`` whose every line of output is kept."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "layerflow_cli", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"NO_COLOR": "1"},
        )
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._new.put(line)

    def wait_line(self, part: str, timeout_s: float = STARTED_S) -> str:
        """The next line that contains `part`; earlier ones are skipped."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._new.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {part!r} in {''.join(self.lines)}") from None
            if part in line:
                return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*arguments: str) -> Run:
        started.append(Run(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.close()


CONFIG = """
[server]
endpoint = "{endpoint}"
http_port = -1
heartbeat_ms = {heartbeat}
liveness_ms = 30000

[pool]
size = "16MiB"
link_gbps = 0.02

[transfer]
{transfer}
"""


def test_limits_change_while_steps_are_in_flight(run: Callable[..., Run], tmp_path: Path) -> None:
    endpoint, file = f"ipc://{tmp_path}/s/control", tmp_path / "layerflow.toml"

    def write(transfer: str, heartbeat: int = 500) -> None:
        fresh = tmp_path / "new"
        fresh.write_text(CONFIG.format(endpoint=endpoint, transfer=transfer, heartbeat=heartbeat))
        fresh.replace(file)

    write('max_transfer_bytes = "64KiB"')
    server = run("--config", str(file))
    server.wait_line(START_LINE)
    control = Control(endpoint, "observer")
    stop = threading.Event()
    served: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with KnownWorker(endpoint, small_spec(6)) as worker:
                while not stop.is_set():
                    chain = worker.prompt(300)
                    worker.serve(chain)
                    assert worker.serve(chain).hit.tokens == 299
                    served.append(299)
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:

        def goes_on() -> bool:
            done = len(served)
            return eventually(lambda: len(served) > done + 1 or failures) and not failures

        assert goes_on(), failures
        write('max_transfer_bytes = "4KiB"\nmax_inflight_bytes = "16KiB"\nprefetch_layers = 1\nh2d_stagger_us = 50')
        server.wait_line("config_applied")
        limits = control.status()["limits"]
        assert (limits["max_transfer_bytes"], limits["prefetch_layers"]) == (4 << 10, 1)
        assert goes_on(), failures
        for transfer, heartbeat, word in (
            ("max_transfer_bytes = 3", 500, "max_transfer_bytes"),
            ("prefetch_layers = 'many'", 500, "prefetch_layers"),
            ("no_such_key = 1", 500, "no_such_key"),
            ("prefetch_layers = ", 500, "layerflow.toml"),
            ("prefetch_layers = 3", 700, "heartbeat_ms"),
        ):
            write(transfer, heartbeat)
            assert word in server.wait_line("config_refused")
            assert control.status()["limits"] == limits, f"the refused edit {transfer!r} has changed something"
        assert goes_on(), failures
        write("max_transfer_blocks = 3\nprefetch_layers = 2")
        server.wait_line("config_applied")
        assert control.status()["limits"]["max_transfer_blocks"] == 3
        assert goes_on(), failures
    finally:
        stop.set()
        thread.join()
        control.close()
    assert not failures, failures


def test_sigterm_lets_open_steps_finish(serve: Callable[..., ServerProcess]) -> None:
    server = serve(pool__link_gbps=0.002, server__drain_timeout_s=100, transfer__max_transfer_bytes="4KiB")
    socket_files = [Path(server.folder) / "control", Path(server.folder) / "control.arena"]
    with KnownWorker(server.endpoint, small_spec(4)) as worker:
        chain = worker.prompt(256)
        worker.serve(chain)
        control = Control(server.endpoint, "observer")
        assert all(file.exists() for file in socket_files)
        run, new = worker.admit(chain), worker.admit(worker.prompt(256))
        assert run.hit.tokens == 255
        step = step_of(worker.agent.open_step([run.request(), new.request()], 100))
        # The server does not end before this one: of one that hangs up, the last words may come too late.
        last = step_of(worker.agent.open_step([worker.admit(worker.prompt(64)).request()], 100))
        assert step.wait_layer(0).ready
        assert eventually(lambda: control.status()["flow"]["steps"] == 2), "the last one is open"
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: not control.status()["healthy"])
        refused = worker.admit(worker.prompt(64), look=False)
        with worker.agent.open_step([refused.request()]) as late:
            assert worker.forward(late, [refused]) == 0
        assert worker.agent.wait_idle(refused.name, PATIENCE_S)
        assert [name for name, _ in worker.agent.poll().failed_saves] == [refused.name]
        assert server.process.poll() is None, "it did not wait for the open step"
        assert worker.forward(step, [run, new]) == 0
        assert not run.failed
        step.close()
        assert worker.agent.wait_idle(new.name, PATIENCE_S)
        assert new.name in worker.agent.poll().saved
        last.close(False)
        assert server.process.wait(PATIENCE_S) == 0
        assert eventually(lambda: not worker.agent.attached)
        control.close()
    assert not any(file.exists() for file in socket_files)


def test_sigterm_does_not_wait_for_ever(serve: Callable[..., ServerProcess]) -> None:
    server = serve(pool__link_gbps=0.0001, server__drain_timeout_s=0.2)
    with KnownWorker(server.endpoint, small_spec(2)) as worker:
        run = worker.admit(worker.prompt(64))
        step = step_of(worker.agent.open_step([run.request()], 60))
        step.layer_done(0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert worker.agent.wait_idle(run.name, PATIENCE_S), "the step outlived the server"
        step.close()


def test_a_second_server_is_refused_and_harms_nobody(
    run: Callable[..., Run], serve: Callable[..., ServerProcess]
) -> None:
    server = serve()
    with KnownWorker(server.endpoint, small_spec(2)) as worker:
        second = run("--endpoint", server.endpoint, "--http-port", "-1")
        assert second.process.wait(PATIENCE_S) != 0
        assert "another server" in second.wait_line("another server")
        chain = worker.prompt(64)
        worker.serve(chain)
        assert worker.serve(chain).hit.tokens == 63
        assert worker.agent.statistics().attachments == 1


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_it_is_ready_before_its_pool_is_warm(run: Callable[..., Run], tmp_path: Path) -> None:
    most_s, took_s = 4.0 * 3, list[float]()  # three times the promise, for machines that are busy
    while len(took_s) < 3 and min(took_s, default=most_s) >= most_s:
        began = time.monotonic()
        server = run("--endpoint", f"ipc://{tmp_path}/s/control", "--pool-size", "8GiB", "--http-port", "-1")
        ready = server.wait_line(START_LINE)
        took_s.append(time.monotonic() - began)
        server.close()
        # In the order in which it says so, not by when this process hears of it.
        before = server.lines[: server.lines.index(ready)]
        assert not any("arena_warm" in line for line in before), "it was warm before it was ready: nothing was shown"
    record("ready", pool="8GiB", ready_s=round(min(took_s), 3))
    assert min(took_s) < most_s


@pytest.mark.parametrize("watched_s", [2.0, pytest.param(30.0, marks=[pytest.mark.campaign, pytest.mark.timeout(300)])])
def test_it_rests_when_idle(serve: Callable[..., ServerProcess], tmp_path: Path, watched_s: float) -> None:
    server = serve(pool__size="16MiB")
    control = Control(server.endpoint, "observer")
    with KnownWorker(server.endpoint, small_spec(2)) as worker:
        worker.serve(worker.prompt(64))

        def warm() -> bool:
            pool = control.status()["pool"]
            return bool(pool["warm_bytes"] >= pool["capacity_bytes"])

        assert eventually(warm)
        pid, began = server.process.pid, time.monotonic()
        used = cpu_seconds(pid)
        threading.Event().wait(watched_s)  # what is measured: so long it has nothing to do
        share = (cpu_seconds(pid) - used) / (time.monotonic() - began)
    control.close()
    record("idle", cpu_share=round(share, 4), attached_workers=1)
    assert share < 0.05

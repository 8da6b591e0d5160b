import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

PATIENCE_S = 60.0


def children(pid: int) -> dict[int, str]:
    """Processes that this one has started, with their command lines."""
    pids = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    found = {}
    for child in map(int, pids):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


@pytest.mark.parametrize("serving", [False, True], ids=["while its server starts", "while it measures"])
def test_a_benchmark_that_is_told_to_end_takes_its_server_with_it(serving):
    command = [sys.executable, "-m", "layerflow_cli", "bench", "overlap"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        try:
            until = time.monotonic() + PATIENCE_S
            while not (servers := [pid for pid, line in children(bench.pid).items() if " run " in line]):
                assert bench.poll() is None and time.monotonic() < until, bench.stderr.read() if bench.stderr else ""
                time.sleep(0.01)
            folder = Path(Path(f"/proc/{servers[0]}/cmdline").read_text().split("ipc://")[1].split("/control")[0])
            while serving and not (folder / "control").exists():
                assert bench.poll() is None and time.monotonic() < until
                time.sleep(0.01)
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            bench.kill()
    assert not Path(f"/proc/{servers[0]}").exists()
    assert not folder.exists()

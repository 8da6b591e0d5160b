"""The server, the proxy and the tools run where torch is not installed; what needs it says so in one line."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from layerflow_cli.errors import NO_TORCH

LISTENING_S = 110
TRIES = 5
COMMAND = [sys.executable, "-c", "from layerflow_cli.main import main; main()"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which ``import torch`` fails as where there is none."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFLOW_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [kept.get("PYTHONPATH")])])}


def layerflow(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], env=environment, capture_output=True, text=True, timeout=LISTENING_S, check=False
    )


def answered(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """A command that asks a server: on a busy machine that may not answer in the time that the command gives it."""
    for _ in range(TRIES):
        done = layerflow(environment, *args)
        if done.returncode == 0:
            break
    return done


@contextmanager
def listening(environment: dict[str, str], *args: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves until SIGTERM, once it has said where."""
    process = subprocess.Popen(
        [*COMMAND, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LISTENING_S)[0], "nothing was said"
        line = process.stdout.readline()
        assert "listening on" in line, line + process.communicate(timeout=LISTENING_S)[1]
        yield process
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LISTENING_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def endpoint(environment, tmp_path_factory) -> Iterator[str]:
    where = f"ipc://{tmp_path_factory.mktemp('room')}/control"
    with listening(environment, "run", "--endpoint", where, "--pool-size", "1MiB", "--http-port", "0"):
        yield where


def test_a_running_server_is_looked_at_emptied_and_examined(environment, endpoint):
    status = answered(environment, "status", "--endpoint", endpoint, "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["pool"]["objects"] == 0
    purged = answered(environment, "purge", "--endpoint", endpoint)
    assert purged.returncode == 0 and "0 objects forgotten" in purged.stdout, purged.stderr
    doctor = answered(environment, "doctor", "--set", f"server.endpoint={endpoint}", "--set", "pool.size=1MiB")
    assert doctor.returncode == 0 and "copy loop" in doctor.stdout, doctor.stderr


def test_looking_at_a_server_loads_no_numpy(environment, endpoint, tmp_path):
    """That would double what ``status`` costs."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    bare = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}
    status = answered(bare, "status", "--endpoint", endpoint)
    assert status.returncode == 0, status.stderr


def test_settings_are_planned(environment, tmp_path):
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "bfloat16"}))
    planned = layerflow(environment, "plan", "--model", str(tmp_path), "--ram", "1GiB")
    assert planned.returncode == 0 and "[transfer]" in planned.stdout, planned.stderr


def test_settings_are_shown_and_the_proxy_listens(environment):
    config = layerflow(environment, "config", "--json")
    assert config.returncode == 0 and json.loads(config.stdout)
    engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    with listening(environment, "proxy", *engines, "--port", "0"):
        pass


@pytest.mark.parametrize(
    "command", [["demo", "--quick"], ["bench", "all"], ["doctor", "--device", "cpu"]], ids=" ".join
)
def test_what_computes_with_torch_says_what_to_install(environment, tmp_path, command):
    refused = layerflow(environment, *command)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"layerflow: {NO_TORCH}\n"

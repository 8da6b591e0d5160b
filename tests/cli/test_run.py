import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow_cli.bench.harness import ServerProcess


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "layerflow.toml"
    path.write_text('[pool]\nsize = "16MiB"\n[transfer]\nprefetch_layers = 1\n[log]\nformat = "json"\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFLOW_")}
    process = subprocess.Popen(
        [
            *[sys.executable, "-c", "from layerflow_cli.main import main; main()", "run", "--config", str(path)],
            *["--http-port", "0", "--endpoint", f"ipc://{tmp_path}/room/control", "--set", "h2d_stagger_us=3"],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process
    process.kill()
    process.communicate()


def event(process: subprocess.Popen[str], name: str) -> dict:
    """The next log event called `name`."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and (found := json.loads(line))["event"] == name:
            return found
    raise AssertionError(f"the server ended without {name}")


def replace(path: Path, text: str) -> None:
    """At once: a server that looks in between would find an empty file."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def test_run_listens_follows_its_file_and_drains(command, tmp_path):
    assert command.stdout is not None
    assert command.stdout.readline() == f"layerflow listening on ipc://{tmp_path}/room/control\n"
    url = command.stdout.readline().removeprefix("layerflow listening on ").strip()

    def status() -> dict:
        with urllib.request.urlopen(f"{url}/status", timeout=10) as answer:
            return json.load(answer)

    limits = status()["limits"]
    assert (limits["prefetch_layers"], limits["h2d_stagger_us"]) == (1, 3)
    path = tmp_path / "layerflow.toml"
    good = path.read_text()
    replace(path, good.replace("prefetch_layers = 1", "prefetch_layers = 2\nh2d_stagger_us = 9"))
    assert event(command, "config_applied")["changes"] == {"transfer.prefetch_layers": 2}
    limits = status()["limits"]
    assert (limits["prefetch_layers"], limits["h2d_stagger_us"]) == (2, 3)
    edited = status()["config"]
    assert edited["path"] == str(path) and edited["refused_since"] is None
    assert edited["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    replace(path, good.replace("16MiB", "32MiB"))
    assert "pool.size (16MiB -> 32MiB)" in event(command, "config_refused")["problems"][0]
    assert status()["limits"]["prefetch_layers"] == 2
    refused = status()["config"]
    assert (refused["sha256"], refused["applied_at"]) == (edited["sha256"], edited["applied_at"])
    assert refused["refused_since"] and refused["refusals"] == 1 and "16MiB -> 32MiB" in refused["problems"][0]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert f'layerflow_config_info{{path="{path}",sha256="{edited["sha256"]}"}} 1.0' in text
    assert "layerflow_config_refusals_total 1.0" in text
    command.send_signal(signal.SIGTERM)
    assert command.wait(timeout=30) == 0


async def test_a_taken_http_port_ends_the_run_with_one_plain_error(tmp_path):
    from layerflow_cli.serving import serve

    lines: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(
            server={"endpoint": f"ipc://{tmp_path}/control", "http_port": taken.getsockname()[1]},
            pool={"size": "1MiB", "warm": False},
        )
        with pytest.raises(ConfigError, match="Address already in use"):
            await serve(settings, None, {}, lines.append)
    assert lines == []


async def test_a_second_server_is_told_of_the_first_before_its_port(tmp_path):
    from layerflow_cli.serving import serve

    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as first:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first.bind(str(tmp_path / "control"))
        first.listen()
        settings = Settings(
            server={"endpoint": f"ipc://{tmp_path}/control", "http_port": taken.getsockname()[1]},
            pool={"size": "1MiB", "warm": False},
        )
        with pytest.raises(ConfigError, match=f"another server is running at .*control \\(process {os.getpid()}\\)"):
            await serve(settings, None, {}, lambda _: None)


def test_an_arena_that_the_machine_can_never_hold_is_refused(tmp_path):
    made = subprocess.run(
        [sys.executable, "-m", "layerflow_cli", "run", "--pool-size", "900TiB", "--http-port", "-1", "--endpoint",
         f"ipc://{tmp_path}/control"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    (line,) = made.stderr.splitlines()
    assert made.returncode == 2 and line.startswith("layerflow: pool.size = 900TiB: 900 TiB; this machine, ")


def test_who_is_told_that_it_listens_may_end_it_at_once():
    server = ServerProcess({"pool.size": "1MiB"})
    server.close()
    assert server.process.returncode == 0

"""``layerflow tune --verify`` against a real server with an engine that loads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.known import eventually
from typer.testing import CliRunner

from layerflow.agent import Control
from layerflow.agent.control import DEFAULT_TIMEOUT_S
from layerflow.errors import LayerflowError
from layerflow_cli.bench.harness import ServerProcess
from layerflow_cli.commands.tune import PATIENCE_S, RunningServer
from layerflow_cli.main import app
from tuning.loaded import BAD, GOOD, loading, serving


class Served:
    """A badly tuned server under load, and files beside its own."""

    def __init__(self, server: ServerProcess, path: Path) -> None:
        self.server, self.path = server, path
        self.control = Control(server.endpoint, engine="test")

    def file(self, name: str, text: str) -> Path:
        path = self.path.with_name(name)
        path.write_text(text)
        return path

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "layerflow_cli", "tune", *args, "--endpoint", self.server.endpoint]

    def tune(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*args), capture_output=True, text=True, timeout=120, check=False)

    def status(self) -> dict[str, Any]:
        return self.control.status(PATIENCE_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("t")
    path = folder / "layerflow.toml"
    path.write_text(BAD)
    with serving(path) as server, loading(server.endpoint):
        scene = Served(server, path)
        yield scene
        scene.control.close()


@pytest.fixture(autouse=True)
def _as_it_was(served: Served) -> Iterator[None]:
    """No test leaves the file, or what holds, other than it was."""
    yield
    assert served.path.read_text() == BAD
    assert eventually(lambda: not served.status()["trial"]["on"])
    assert served.status()["limits"]["prefetch_layers"] == 1


@pytest.fixture
def awful(served: Served) -> Iterator[None]:
    """The file asks for copies so small that no load on this machine hides what they cost: 64 of 300 us a layer."""
    served.path.write_text(BAD.replace("64KiB", "16KiB"))
    assert eventually(lambda: served.status()["limits"]["max_transfer_bytes"] == 16 << 10)
    yield
    served.path.write_text(BAD)
    assert eventually(lambda: served.status()["limits"]["max_transfer_bytes"] == 64 << 10)


@pytest.mark.usefixtures("awful")
def test_better_settings_are_confirmed(served: Served, tmp_path: Path) -> None:
    tuned, report, page = served.file("good.toml", GOOD), tmp_path / "r.json", tmp_path / "r.html"
    before = served.path.read_text()
    told: dict[str, Any] = {}
    for window_s in (1.1, 2.5, 5.0):  # longer where other work on this machine has hidden it
        args = ("--verify", str(tuned), "--for", f"{12 * window_s:g}s", "--window", f"{window_s:g}s")
        command = subprocess.Popen(
            served.command(*args, "--json", str(report), "--html", str(page)), stderr=subprocess.PIPE, text=True
        )
        seen = set()

        def over(command: subprocess.Popen[str] = command, seen: set[tuple[str, int, int]] = seen) -> bool:
            seen.add(_in_force(served.status()))
            return command.poll() is not None

        assert eventually(over, timeout_s=60 + 20 * window_s, every_s=0.1)
        errors = command.communicate()[1]
        told = json.loads(report.read_text())
        assert command.returncode == (0 if told["verdict"] == "confirmed" else 1), errors
        assert (
            {("tuned", 4, 4 << 20), ("file", 1, 16 << 10)}
            <= seen
            <= {
                ("tuned", 4, 4 << 20),
                ("file", 1, 16 << 10),
                ("", 1, 16 << 10),
            }
        )
        assert told["tuned_sha256"] == hashlib.sha256(GOOD.encode()).hexdigest()
        assert told["changes"] == {"transfer.prefetch_layers": 4, "transfer.max_transfer_bytes": 4 << 20}
        arms = [window["settings"] for window in told["windows"]]
        assert arms == ["file", "tuned", "tuned", "file"] * (len(arms) // 4) + ["file", "tuned"][: len(arms) % 4]
        # A busy machine may leave a window without a step.
        assert page.read_text().count("<rect") == sum(window["loading_steps"] > 0 for window in told["windows"])
        assert served.path.read_text() == before and _in_force(served.status()) == ("", 1, 16 << 10)
        if told["verdict"] == "confirmed":
            break
    assert told["verdict"] == "confirmed" and len(told["windows"]) == 12, told
    assert told["figures"]["exposed_ms"]["tuned"] < told["figures"]["exposed_ms"]["file"]


def _said(command: Any) -> list[str]:
    """Its lines on standard output. The load is in this process too, and logs there when its server stands still."""
    return [line for line in command.stdout.splitlines() if " server_" not in line]


def _in_force(status: dict[str, Any]) -> tuple[str, int, int]:
    """What is held, and the limits in force at that moment."""
    limits, sha256 = status["limits"], status["trial"]["sha256"]
    names = {hashlib.sha256(GOOD.encode()).hexdigest(): "tuned", hashlib.sha256(b"").hexdigest(): "file", "": ""}
    return names[sha256], limits["prefetch_layers"], limits["max_transfer_bytes"]


def test_harmful_settings_are_taken_back(served: Served) -> None:
    # As if somebody found 4 KiB a copy a good idea: a layer is 256 copies of 300 us.
    harmful = served.file("harmful.toml", BAD.replace("64KiB", "4KiB"))
    done = served.tune("--verify", str(harmful), "--for", "50s", "--window", "5s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "taken back: " in done.stdout and "1 file " in done.stdout and "2 tuned" in done.stdout
    assert served.status()["trial"]["reason"] == "it was asked to"


def test_a_killed_command_and_a_second_one(served: Served) -> None:
    good = served.file("good.toml", GOOD)
    first = subprocess.Popen(
        served.command("--verify", str(good), "--for", "20s", "--window", "2s"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert eventually(lambda: served.status()["trial"]["changes"])
        assert served.status()["limits"]["prefetch_layers"] == 4
        second = served.tune("--verify", str(good))
        assert second.returncode == 2 and "one at a time" in second.stderr and second.stderr.count("\n") <= 2
        assert "trial: " not in second.stderr
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert eventually(lambda: not served.status()["trial"]["on"], timeout_s=5)
    assert served.status()["trial"]["reason"] == "its client is gone"


def test_a_trial_ends_after_its_time_and_with_an_edit(served: Served) -> None:
    told = served.control.try_settings(GOOD.encode(), 0.2)
    assert told["on"] and told["changes"]
    assert eventually(lambda: served.status()["trial"]["reason"] == "its time is up")
    served.control.try_settings(GOOD.encode(), 60)
    served.path.write_text(BAD.replace("64KiB", "128KiB"))
    try:
        assert eventually(lambda: served.status()["trial"]["reason"] == "the file was edited")
        assert served.status()["limits"]["max_transfer_bytes"] == 128 << 10
        served.control.try_settings(GOOD.encode(), 60)
        served.path.write_text(BAD.replace("64KiB", "128KiB") + "# Nothing else.\n")
        assert eventually(lambda: not served.status()["trial"]["on"])
        assert served.status()["trial"]["reason"] == "the file was edited"
    finally:
        served.path.write_text(BAD)
    assert eventually(lambda: served.status()["limits"]["max_transfer_bytes"] == 64 << 10)


def test_a_server_that_stands_still_is_waited_for(served: Served) -> None:
    server = RunningServer(served.control)
    here, pid = server.look().incarnation, served.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    again = threading.Timer(DEFAULT_TIMEOUT_S + 0.5, os.kill, (pid, signal.SIGCONT))
    again.start()
    try:
        assert server.look().incarnation == here
    finally:
        again.join()


def test_a_report_that_cannot_be_written_is_printed_and_changes_no_exit_code(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "gone" / "r.json"

    def terminated(*_: object) -> None:
        report.parent.rmdir()
        raise SystemExit(143)

    monkeypatch.setattr("layerflow.tuning.verify.verify", terminated)
    report.parent.mkdir()
    command = served.command("--verify", str(served.file("good.toml", GOOD)), "--json", str(report))
    done = CliRunner().invoke(app, command[command.index("tune") :])
    assert done.exit_code == 143 and "cannot be written" in done.stderr, done.output
    assert json.loads(done.stdout)["changes"]
    again = CliRunner().invoke(app, command[command.index("tune") :])
    assert again.exit_code == 2 and not _said(again) and again.stderr.count("\n") == 1, "before the work"


def test_what_a_flag_of_the_server_sets_is_said_to_be_without_effect(served: Served, tmp_path: Path) -> None:
    tuned, report = served.file("sized.toml", GOOD + '[pool]\nsize = "1GiB"\nlink_gbps = 1.0\n'), tmp_path / "r.json"
    command = subprocess.Popen(
        served.command("--verify", str(tuned), "--json", str(report)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: served.status()["trial"]["on"])
        command.terminate()
        told, said = command.communicate(timeout=60)
    finally:
        command.kill()
    assert "without effect here: pool.size, which a flag of the server sets" in said and command.returncode == 143
    assert json.loads(report.read_text())["overruled"] == {"pool.size": "a flag"}
    assert max(map(len, said.splitlines())) <= 80 and "exposed ms of a step" in told, "and the figures are told as well"


def test_a_server_that_goes_away_cuts_it_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, good, report = tmp_path / "layerflow.toml", tmp_path / "good.toml", tmp_path / "r.json"
    path.write_text(BAD)
    good.write_text(GOOD)
    monkeypatch.setattr("layerflow_cli.commands.tune.PATIENCE_S", 1.0)
    with serving(path) as server, contextlib.closing(Control(server.endpoint, engine="test")) as control:

        def kill() -> None:
            if eventually(lambda: control.status()["trial"]["changes"]):
                os.kill(control.status()["pid"], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        args = ("--verify", str(good), "--for", "60s", "--json", str(report), "--endpoint", server.endpoint)
        done = CliRunner().invoke(app, ["tune", *args])
        killer.join()
    assert done.exit_code == 1 and "did not answer at the end" in done.stdout, done.output
    assert json.loads(report.read_text())["verdict"] == "cut short"


@pytest.mark.parametrize(
    ("text", "args", "words"),
    [
        (GOOD + '[pool]\nbackend = "disk"\n[pool.disk]\npath = "/x"\n', (), "pool.backend"),
        (GOOD + "[pool]\nlease_share = 0.125\n", (), "-> 0.125); let the tried settings have what the server has"),
        (GOOD + "[pool]\nlease_share = 0.125\n", (), "wrong.toml"),
        (BAD, (), "changes nothing"),
        ("[transfer]\nprefetch_layer = 4\n", (), "did you mean transfer.prefetch_layers?"),
        (GOOD, ("--goal", "ttft_p99"), "does not see first tokens"),
        (GOOD, ("--goal", "speed"), "use exposed, exposed_p99"),
        (GOOD, ("--goal", "exposed_p99=20"), "seconds or milliseconds?"),
        (GOOD, ("--goal", "exposed_p99=abc"), "--goal exposed_p99=abc: write a time"),
        (GOOD, ("--for", "10s", "--window", "5s"), "at least 5 pairs"),
    ],
)
def test_wrong_input_is_one_line(served: Served, text: str, args: tuple[str, ...], words: str) -> None:
    command = served.command("--verify", str(served.file("wrong.toml", text)), *args)
    done = CliRunner().invoke(app, command[command.index("tune") :])
    assert done.exit_code == 2 and not _said(done) and words in done.stderr, done.output
    assert done.stderr.count("\n") == 1


def test_a_server_without_a_file_tries_nothing(tmp_path: Path) -> None:
    server = ServerProcess({"pool.size": "16MiB"})
    control = Control(server.endpoint, engine="test")
    try:
        with pytest.raises(LayerflowError, match="follows no file"):
            control.try_settings(GOOD.encode(), 1.0)
    finally:
        control.close()
        server.close()

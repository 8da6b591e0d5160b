"""``layerflow record`` and ``layerflow trace`` against running servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_lines
import pytest
from e2e.known import KnownWorker, eventually, small_spec
from typer.testing import CliRunner

from layerflow.config.settings import Settings
from layerflow.errors import LayerflowError
from layerflow.server import EmbeddedServer
from layerflow_cli.main import app
from layerflow_cli.options import parse_duration

SPEC = small_spec()


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def told(target: Path, *args: str) -> Any:
    """The command's JSON, by way of a file: the embedded server logs to this process's standard output."""
    result = invoke(*args, "--json", str(target))
    return json.loads(target.read_text()) if result.exit_code == 0 else {"error": result.stderr}


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, KnownWorker]]:
    """The control socket of a server, and a worker on it."""
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    endpoint = f"ipc://{folder}/control"
    settings = Settings(pool={"size": "16MiB"}, server={"liveness_ms": 60_000, "drain_timeout_s": 0.2})
    server = EmbeddedServer(settings, endpoint)
    with KnownWorker(endpoint, spec=SPEC, name="vllm-0") as worker:
        yield endpoint, worker
    server.close()


def test_a_recording_ends_by_itself_and_is_told(served: tuple[str, KnownWorker], tmp_path: Path) -> None:
    endpoint, _ = served
    path = tmp_path / "x.lfr"
    found = told(tmp_path / "x.json", "record", "--for", "0.5s", "-o", str(path), "--endpoint", endpoint)
    assert found["engines"] == ["vllm-0"] and found["counts"]["workers"] == 1 and found["models"][0]["name"] == "known"
    shown = invoke("record", "--info", str(path))
    assert shown.exit_code == 0 and "vllm-0" not in shown.stderr
    assert "4 layers (4 x full), chunks of 16 tokens" in shown.stdout and "ModelSeen" in shown.stdout
    assert max(map(len, shown.stdout.splitlines()[1:])) <= 100


def test_a_path_that_no_file_can_have_ends_that_recording_alone(
    served: tuple[str, KnownWorker], tmp_path: Path
) -> None:
    _, worker = served
    with pytest.raises(LayerflowError):
        worker.agent._control.record(tmp_path / "a\0b", 600, 1 << 20)
    worker.agent._control.record(tmp_path / "x.lfr", 600, 1 << 20)
    worker.agent._control.end_recording()
    assert invoke("record", "--info", str(tmp_path / "x.lfr")).exit_code == 0


def test_a_trace_of_a_running_server_is_a_page_and_a_file_for_perfetto(
    served: tuple[str, KnownWorker], tmp_path: Path
) -> None:
    endpoint, worker = served
    nothing = invoke("trace", "--endpoint", endpoint, "--out", str(tmp_path / "none"))
    assert nothing.exit_code == 2 and "no step that moved anything" in nothing.stderr
    assert not (tmp_path / "none").exists()
    for _ in range(3):
        worker.serve(worker.prompt(64))
    out = tmp_path / "out"
    args = ("trace", "--endpoint", endpoint, "--last", "10m", "--engine", "vllm-0", "--out", str(out))
    assert eventually(lambda: told(tmp_path / "x.json", *args).get("steps") == 3)
    page = (out / "timeline.html").read_text()
    assert page.count("vllm-0, rank 0, step") >= 3 and "http://" not in re.sub(r"http://www.w3.org\S+", "", page)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"compute", "save"}
    unknown = invoke("trace", "--endpoint", endpoint, "--engine", "vllm-1")
    assert unknown.exit_code == 2 and "there are vllm-0" in unknown.stderr


def test_a_trace_of_a_recording(served: tuple[str, KnownWorker], tmp_path: Path) -> None:
    _, worker = served
    path, out = tmp_path / "x.lfr", tmp_path / "out"
    worker.agent._control.record(path, 600, 1 << 20)  # as a second client would
    worker.serve(worker.prompt(64))
    assert eventually(lambda: told(tmp_path / "x.json", "trace", str(path), "--out", str(out)).get("steps") == 1)
    unknown = invoke("trace", str(path), "--engine", "vllm-1")
    assert unknown.exit_code == 2 and "has no engine 'vllm-1'; there are vllm-0" in unknown.stderr


@pytest.mark.parametrize(("size", "words"), [("100", "100: give 1MiB to 1TiB"), ("1000TiB", "1000TiB: give 1MiB")])
def test_a_size_that_no_recording_has(served: tuple[str, KnownWorker], tmp_path: Path, size: str, words: str) -> None:
    done = invoke("record", "-o", str(tmp_path / "x"), "--max-bytes", size, "--endpoint", served[0])
    assert done.exit_code == 2 and words in done.stderr and done.stderr.startswith("layerflow: a recording of")


def test_a_refusal_of_the_server_has_no_code(served: tuple[str, KnownWorker], tmp_path: Path) -> None:
    done = invoke("record", "-o", str(tmp_path), "--endpoint", served[0])
    assert done.exit_code == 2 and done.stderr.startswith(f"layerflow: {tmp_path}: there is something that is no plain")


def test_options_of_the_other_mode_are_refused() -> None:
    said = command_lines.refused("record", "--info", "x.lfr", "--for", "1h", "--max-bytes", "1GiB")
    assert "--for, --max-bytes: tells how to record" in said
    assert "--endpoint: a recording asks no server" in command_lines.refused("trace", "x.lfr", "--endpoint", "ipc:///x")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20m", 1200), ("1h", 3600), ("1.5 h", 5400), ("500ms", 0.5), ("7", 7)]
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration("--for", text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1y", "-1s", "31d", "h"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(LayerflowError, match="--for"):
        parse_duration("--for", text)

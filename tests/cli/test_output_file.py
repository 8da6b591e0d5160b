"""Files that commands write: refused before the work, whole or not there, and never instead of a result."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import command_lines
import pytest

from layerflow.errors import ConfigError
from layerflow.observe import timeline
from layerflow.observe.trace import StepTrace, render
from layerflow_cli.output import write_json
from layerflow_cli.output_file import PAGE, TRACE, write_all, write_file, write_folder


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a measurement has begun."""
    from layerflow_cli.commands import bench

    begun: list[str] = []
    monkeypatch.setattr(bench, "_measure", lambda name, *_: begun.append(name) or {"x_ms": 1.0})
    return begun


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none/x.json", "No such file"),
        ("folder", "it is a folder"),
        ("file/x.json", "Not a directory"),
        ("monday.lfr", "is a recording"),
        ("loop", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: list[str], name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("x")
    Path("loop").symlink_to("loop")
    Path("monday.lfr").write_bytes(b"LAYERFLOW-RECORD" + bytes(100))
    there = sorted(Path().rglob("*"))
    said = command_lines.refused("bench", "flow", "--json", name)
    assert said.startswith(f"layerflow: --json {name}: ") and words in said
    assert not work and sorted(Path().rglob("*")) == there and len(Path("monday.lfr").read_bytes()) == 116


def test_two_options_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("same").symlink_to("x")
    curve = ("simulate", "t.jsonl", "--curve", "pool.size")
    said = command_lines.refused(*curve, "--html", "x", "--json", "same")
    assert "--html" in said and "--json" in said and "a file of its own" in said
    assert "a file of its own" not in command_lines.refused(*curve, "--html", "/dev/null", "--json", "/dev/null")


@pytest.mark.parametrize(
    "command",
    [
        "simulate in.jsonl --json in.jsonl",
        "simulate --curve pool.size --html in.jsonl in.jsonl",
        "simulate t.jsonl --config in.jsonl --json link.jsonl",
        "simulate --json in.jsonl t.jsonl --model .",
        "plan --model . --json in.jsonl",
        "plan --table in.jsonl --json in.jsonl",
        "tune in.jsonl --config c.toml -o link.jsonl",
        "tune --verify in.jsonl --json in.jsonl",
        "trace in.jsonl --json in.jsonl",
        "record --info in.jsonl --json in.jsonl",
        "config --check in.jsonl --json in.jsonl",
    ],
)
def test_a_command_does_not_replace_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"x": 1}')
    Path("link.jsonl").symlink_to("in.jsonl")
    said = command_lines.refused(*command.split())
    assert "this command uses " in said and "give another name" in said
    assert Path("in.jsonl").read_text() == '{"x": 1}'


@pytest.mark.parametrize("text", ["[pool]\nsize = '1GiB'\n", "use_layerwise = true\n", "[transfer]\nnope = 1\n"])
def test_settings_are_not_replaced_by_figures(tmp_path: Path, work: list[str], text: str) -> None:
    """As where LAYERFLOW_CONFIG or another command's --config names them."""
    file = tmp_path / "layerflow.toml"
    file.write_text(text)
    assert "is a file of settings" in command_lines.refused("bench", "flow", "--json", str(file))
    assert not work and file.read_text() == text


def test_figures_replace_figures(tmp_path: Path, work: list[str]) -> None:
    file = tmp_path / "figures"
    for text in ("", "x = 1\n", '{"pool": 1}'):
        file.write_text(text)
        assert command_lines.run("bench", "lookup", "--json", str(file)).exit_code == 0
        assert json.loads(file.read_text()) == {"x_ms": 1.0}


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in command_lines.refused("trace", "x.lfr", "--out", str(tmp_path / "file"))
    assert "cannot be read" in command_lines.refused("trace", "x.lfr", "--out", str(tmp_path / "a" / "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [PAGE, TRACE])
@pytest.mark.parametrize("command", ["trace x.lfr", "demo --quick"])
def test_another_program_s_trace_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("out", name)
    file.parent.mkdir()
    for text in ("", '{"schemaVersion": 1, "traceEvents": []}', "<title>mine</title>"):
        file.write_text(text)
        said = command_lines.refused(*command.split(), "--out", "out")
        assert f"--out out: {name} there is not layerflow's" in said and file.read_text() == text


def test_its_own_trace_is_replaced(tmp_path: Path) -> None:
    steps = [StepTrace(1, 1, "vllm-0, rank 0, step 1")]
    for traces in ([], steps, steps, []):
        page, trace = timeline.render(traces, "layerflow: the last steps"), json.dumps(render(traces))
        paths = write_folder("--out", tmp_path / "out", page, trace)
        assert [path.read_text() for path in paths] == [page, trace]


def test_links_and_rights_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to(real)
    write_file("--json", link, "after")
    assert link.is_symlink() and real.read_text() == "after" and stat.S_IMODE(real.stat().st_mode) == 0o640
    mask = os.umask(0o077)
    try:
        write_file("--json", tmp_path / "own", "x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file("--json", tmp_path / "pipe", "told")
        assert os.read(reader, 100) == b"told" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    finally:
        os.close(reader)
    write_file("--json", Path("/dev/null"), "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_is_there_stays_until_the_new_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_file("--json", file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "none" / "x.json", {"x": 1})
    assert json.loads(capsys.readouterr().out) == {"x": 1}


def test_a_recording_that_was_made_meanwhile_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of ``layerflow record -o x --json x``."""
    (tmp_path / "x").write_bytes(b"LAYERFLOW-RECORD")
    with pytest.raises(ConfigError, match="is a recording"):
        write_json(tmp_path / "x", {"x": 1})
    assert json.loads(capsys.readouterr().out) == {"x": 1} and (tmp_path / "x").read_bytes() == b"LAYERFLOW-RECORD"


def test_one_file_costs_no_other(tmp_path: Path) -> None:
    def writes(name: str) -> Callable[[], None]:
        return lambda: write_file("--html", tmp_path / name, "x")

    with pytest.raises(ConfigError) as error:
        write_all(writes("none/a"), writes("b"), writes("none/c"))
    assert str(error.value).count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["b"]

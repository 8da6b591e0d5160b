"""What ``layerflow bench`` takes, what it refuses in one line, and what of a result stays."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import command_lines
import pytest

from layerflow.errors import LayerflowError
from layerflow_cli.bench import harness, record
from layerflow_cli.commands.bench import MEASUREMENTS, module_of


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts other functions in the place of all measurements."""

    def put(measure: Callable[..., Any]) -> None:
        for name in MEASUREMENTS:
            module = types.ModuleType(name)
            module.measure = measure  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module_of(name), module)

    return put


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("overlap --transfer-ms 0", "--transfer-ms: 0 is too little"),
        ("pd --transfer-ms 0", "--transfer-ms: 0 is too little"),
        ("pd --compute-ms -1", "--compute-ms: -1 is too little"),
        ("flow --sessions 0", "--sessions 0: there is at least 1"),
        ("flow --sessions 1,x", "--sessions 1,x: write numbers as 1,100"),
        ("miss --set preset=nope", "preset nope: use one of "),
        ("proxy --set rounds=-5", "--set rounds=-5: should be above 0"),
        ("proxy --set streams=-1", "--set streams=-1: should be at least 0"),
        ("overlap --set runs=0", "--set runs=0: should be above 0"),
        ("lookup --set lookups=0", "--set lookups=0: should be above 0"),
        ("auto --set link_gbps=1,0", "--set link_gbps=1,0: should be above 0"),
        ("auto --set case_s=inf", "inf is no number"),
        ("record --set events=0", "--set events=0: should be above 0"),
        ("overlap --set shape=nonsense", "--set shape: has an option of its own"),
        ("server --set tp_size=4", "--set tp_size: has an option of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments: str, words: str) -> None:
    assert words in command_lines.refused("bench", *arguments.split())


def _measure(way: Literal["a", "b"] = "a", size: int = 1) -> dict[str, Any]:
    if size == 2:
        raise MemoryError
    return {"x_ms": 1.0 / (size - 1)}


def test_choices_and_foreign_errors_are_lines(measuring: Callable[..., None]) -> None:
    measuring(_measure)
    assert "--set way=c: use one of a, b" in command_lines.refused("bench", "lookup", "--set", "way=c")
    said = command_lines.refused("bench", "lookup", "--set", "way=b")
    assert said.startswith("layerflow: bench lookup cannot be measured with these arguments: ZeroDivisionError: ")
    assert command_lines.refused("bench", "lookup", "--set", "size=2").endswith("arguments: MemoryError")


@pytest.mark.parametrize("json_file", ["-", "all.json"])
def test_an_interrupted_run_of_all_keeps_what_was_measured(
    measuring: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_file: str
) -> None:
    begun: list[int] = []

    def measure() -> dict[str, Any]:
        begun.append(1)
        if len(begun) == 2:
            raise AssertionError("a measurement's own mistake\nin lines")
        if len(begun) == 4:
            raise KeyboardInterrupt
        return {"x_ms": 1.0}

    measuring(measure)
    monkeypatch.chdir(tmp_path)
    result = command_lines.run("bench", "all", "--json", json_file)
    first, second, third, *_ = MEASUREMENTS
    told = json.loads(Path(json_file).read_text() if json_file != "-" else result.stdout)
    assert told == {first: {"x_ms": 1.0}, third: {"x_ms": 1.0}} and result.exit_code == 130
    assert f"layerflow: bench {second}: AssertionError: a measurement's own mistake in lines\n" in result.stderr


def test_a_bench_s_server_has_no_settings_of_the_operator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = {
        "LAYERFLOW_CONFIG": "/prod.toml",
        "LAYERFLOW_POOL__DISK__PATH": "/prod",
        "layerflow_record__path": "/x",
    }
    for name, value in operators.items():
        monkeypatch.setenv(name, value)
    started: list[dict[str, str]] = []

    def popen(_: object, command: object, environment: dict[str, str]) -> None:
        started.append(dict(environment))
        raise LayerflowError("started")

    monkeypatch.setattr(harness.ServerProcess, "_popen", popen)
    assert command_lines.refused("bench", "lookup") == "layerflow: started"
    assert not [name for name in started[0] if name.upper().startswith("LAYERFLOW_")] and "PATH" in started[0]
    assert {name: os.environ[name] for name in operators} == operators


@pytest.mark.parametrize(("option", "run"), [("--quick", "run_demo"), ("--pd", "pd.run_pd_demo")])
def test_a_demo_has_no_settings_of_the_operator_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, run: str
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(f"layerflow_cli.demo.{run}", lambda **_: seen.append(os.environ.get("LAYERFLOW_CONFIG")))
    monkeypatch.setenv("LAYERFLOW_CONFIG", "/prod.toml")
    command_lines.run("demo", option, "--out", str(tmp_path / "out"))
    assert seen == [None]


def test_events_of_a_recording_are_whole_layers() -> None:
    assert record.measure(events=6, tokens=256, lookups=0)["events"] == 8

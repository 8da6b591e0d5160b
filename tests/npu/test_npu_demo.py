"""The demo and the overlap measurement with the engine's cache on an NPU (CANN emulated): no times, bytes, tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if not os.environ.get("LAYERFLOW_TEST_NPU"):
    pytest.skip("runs by tests/npu/run.sh only", allow_module_level=True)


def layerflow(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, object]]:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-c", "import torch_npu; from layerflow_cli.main import main; main()"]
    done = subprocess.run(
        [*command, *arguments, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"CANN_EMU_EVENT_DELAY_US": "200", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def test_no_byte_and_no_token_of_the_demo_is_wrong(tmp_path: Path) -> None:
    shown, figures = layerflow(tmp_path, "demo", "--quick", "--device", "npu")
    assert "engines' caches on npu (CANN emulated), which compute on the host" in shown
    assert figures["device"] == {"kind": "npu", "emulated": True, "compute": "host"}


def test_overlap_is_measured_on_the_device(tmp_path: Path) -> None:
    options = ("--layers", "4", "--compute-ms", "20", "--compute", "matmul", "--set", "runs=2")
    _, figures = layerflow(tmp_path, "bench", "overlap", "--device", "npu", *options)
    assert (figures["device"], figures["emulated"], figures["link"]) == ("npu", True, "the device's")

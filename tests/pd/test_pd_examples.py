"""The examples run as they are, and the decode engine loads all but one token."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ENVIRONMENT, MODELS

from layerflow_testing.ports import held_ports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pd"
BIN = Path(sys.executable).parent
SMALL = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32",
    "--kv-cache-memory-bytes", str(64 << 20),
)  # fmt: skip
LONG_S = 280
NAMES = ("PORT", "PORT2", "PROXY_PORT", "HTTP_PORT", "BOOTSTRAP_PORT", "ROUTER_METRICS_PORT")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["proxy.sh", "router.sh"])
def test_example(name: str, tmp_path: Path) -> None:
    if name == "router.sh" and shutil.which("vllm-router", path=str(BIN)) is None:
        pytest.skip("vllm-router is not installed")
    ports = {key: str(port) for key, port in zip(NAMES, held_ports(len(NAMES)), strict=True)}
    environment = os.environ | ENVIRONMENT | ports | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"LOGS": str(tmp_path), "COLUMNS": "200"}
    command = [str(EXAMPLES / name), str(MODELS / "llama"), *SMALL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            text, errors = running.communicate(timeout=LONG_S)
        finally:
            running.terminate()  # if it hangs: it then stops what it has started
    assert running.returncode == 0, f"{text}\n{errors}"
    asked = re.search(r"of (\d+) prompt tokens cached; \"(.+)\"", text)
    loaded = re.search(r"has loaded (\d+) prompt tokens", text)
    assert asked
    assert loaded
    assert int(loaded[1]) == int(asked[1]) - 1

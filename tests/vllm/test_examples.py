"""The examples run as they are, over HTTP, and show what their README says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ENVIRONMENT, MODELS

from layerflow_testing.ports import held_ports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "vllm"
SMALL = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32",
    "--kv-cache-memory-bytes", str(64 << 20),
)  # fmt: skip
LONG_S = 280
ANSWER = re.compile(r"^port (\d+): (\d+) of (\d+) prompt tokens cached; (.*)$", re.M)


class Shown:
    """What an example has printed.

    :param answers: (port, cached tokens, prompt tokens, text), in order.
    """

    def __init__(self, name: str, logs: Path) -> None:
        self.ports = held_ports(2)
        http = held_ports(1)[0]
        engine = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ports = {"PORT": str(self.ports[0]), "PORT2": str(self.ports[1]), "HTTP_PORT": str(http)}
        environment = os.environ | engine | ports | {"PATH": programs, "LOGS": str(logs), "COLUMNS": "200"}
        command = [str(EXAMPLES / name), str(MODELS / "llama"), *SMALL]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as running:
            try:
                self.text, errors = running.communicate(timeout=LONG_S)
            finally:
                running.terminate()  # if it hangs: it then stops what it has started
        assert running.returncode == 0, f"{self.text}\n{errors}"
        self.answers = [
            (int(port), int(cached), int(tokens), json.loads(text))
            for port, cached, tokens, text in ANSWER.findall(self.text)
        ]


@pytest.mark.timeout(300)
def test_single(tmp_path: Path) -> None:
    shown = Shown("single.sh", tmp_path)
    first, second, third = shown.answers
    assert (first[1], second[1]) == (0, second[2] - 1)
    assert first[3] == second[3] != ""
    assert 256 <= third[1] < third[2]
    loaded = re.search(r"^layerflow_vllm_load_bytes_total\{.*\} (\S+)$", shown.text, re.M)
    assert loaded
    assert float(loaded[1]) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["shared.sh", "prefill_decode.sh"])
def test_two_engines(name: str, tmp_path: Path) -> None:
    shown = Shown(name, tmp_path)
    first, second = shown.answers
    assert [first[0], second[0]] == shown.ports
    assert first[1] == 0
    assert second[1] == second[2] - 1
    assert first[3]
    assert second[3].startswith(first[3])
    assert not any(_listens(port) for port in shown.ports), "an engine was left running"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

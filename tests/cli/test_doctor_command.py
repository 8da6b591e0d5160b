import json
import os
import socket

import pytest
from typer.testing import CliRunner

from layerflow.findings import Finding, Severity
from layerflow_cli.commands.doctor import finding_lines
from layerflow_cli.main import app


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def invoke(*args: str):
    return CliRunner().invoke(app, ["doctor", "--set", "server.http_port=-1", "--set", "pool.size=1MiB", *args])


def test_a_healthy_configuration(tmp_path):
    path = tmp_path / "layerflow.toml"
    path.write_text('[log]\nlevel = "debug"\n')
    result = invoke("--config", str(path))
    assert result.exit_code == 0, result.output
    assert "endpoint directory" in result.stdout and "problem" not in result.stdout


def test_a_master_that_is_away_costs_exit_code_1_and_json_says_which():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{held.getsockname()[1]}"
        flags = ["--set", "pool.backend=mooncake", "--set", f"pool.mooncake.master={master}"]
        result = invoke(*flags, "--set", "pool.mooncake.metrics=", "--json")
        table = invoke(*flags, "--set", "pool.mooncake.metrics=")
    assert result.exit_code == table.exit_code == 1
    assert "start mooncake_master" in table.stdout
    findings = json.loads(result.stdout)
    assert all(list(finding) == ["check", "state", "found", "advice"] for finding in findings)
    assert {finding["state"] for finding in findings} <= {"ok", "warning", "problem"}
    (away,) = (finding for finding in findings if finding["check"] == "mooncake master")
    assert away["state"] == "problem" and master in away["found"] and "pool.mooncake.master" in away["advice"]


def test_a_configuration_that_is_wrong_in_itself_costs_exit_code_2(tmp_path):
    path = tmp_path / "layerflow.toml"
    path.write_text("[pool.mooncake]\nmastr = 'x:1'\n")
    result = invoke("--config", str(path))
    assert result.exit_code == 2 and result.stdout == ""
    assert "did you mean pool.mooncake.master?" in result.stderr


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_finding_fits_the_screen(width):
    found = "9 GiB of 24 GiB are free, of which the control group leaves 8 GiB; " * 3 + "/a/folder/" + "b" * 40
    lines = finding_lines(Finding("memory", Severity.PROBLEM, found, "choose a smaller pool.size"), width)
    assert lines[0].startswith("problem  memory: 9 GiB") and lines[-1] == " " * 11 + "choose a smaller pool.size"
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines[:-1]) == f"problem  memory: {found}"

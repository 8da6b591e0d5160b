"""A backend of another package: what its plugin tells is used by the commands, and nothing else knows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''
import sys
from layerflow.backends import Plugin, Trial
from layerflow.config.fields import BackendOptions, setting
from layerflow.findings import problem, warning


class Options(BackendOptions):
    """A shelf, used with ``backend = "shelf"``."""

    board: str = setting("oak", "What it is made of.")
    code: str = setting("", "Opens it.", secret=True)

    def unreachable(self):
        return ("it stands in a cellar", "carry it upstairs") if self.board == "stone" else None


PLUGIN = Plugin(
    backend="shelf_native:Shelf",
    options=Options,
    aliases=("rack",),
    environment="shelf:environment",
    examine="shelf:examine",
    trial="shelf:trial",
)


def environment(options):
    return {"SHELF_BOARD": options["board"]}


def examine(options, pool, running):
    assert "shelf_native" not in sys.modules
    yield warning("shelf board", f"{options.board} beside {pool.size} bytes", "polish it")
    if not options.code:
        yield problem("shelf code", "there is none", "set pool.shelf.code")


def trial(options, folder, nbytes, running):
    return Trial(options={"code": "1234"}, other={"board": "pine"}, remark="a toy")
'''


@pytest.fixture
def run(tmp_path: Path):
    """Runs Python where the package is installed."""
    (tmp_path / "shelf.py").write_text(MODULE)
    (tmp_path / "shelf_native.py").write_text("raise ImportError('for host processes only')")
    told = tmp_path / "shelf-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[layerflow.backends]\nshelf = shelf:PLUGIN\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFLOW_")}
    variables = clean | {"PYTHONPATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(arguments if arguments[0] == "-c" else ("-m", "layerflow_cli", *arguments))]
        return subprocess.run(command, env=variables | more, capture_output=True, text=True, check=False)

    return run


def test_the_configuration_has_its_section(run) -> None:
    listed = run("config", "--markdown")
    assert "[pool.shelf]" in listed.stdout and "What it is made of." in listed.stdout, listed.stderr
    used = run("config", "--effective", "--set", "pool.backend=rack", LAYERFLOW_POOL__SHELF__CODE="sesame")
    assert "shelf" in used.stdout and "sesame" not in used.stdout, used.stderr


def test_the_doctor_has_what_it_examines(run) -> None:
    done = run("doctor", "--set", "pool.backend=shelf", "--set", "pool.shelf.board=stone", "--json", "-")
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert found["shelf address"]["advice"] == "carry it upstairs" and found["shelf address"]["state"] == "problem"
    assert found["shelf board"]["found"].startswith("stone beside ") and found["shelf board"]["state"] == "warning"
    assert found["shelf code"]["state"] == "problem"


def test_it_is_what_the_server_starts_and_the_bench_tries(run) -> None:
    use = """
from pathlib import Path
from layerflow.config.settings import Settings
from layerflow.hosts.environment import environment
from layerflow.server.terms import tier_of
from layerflow_cli.bench.pool.services import behind

name, options = tier_of(Settings(pool={"backend": "shelf", "shelf": {"board": "ash"}}))
print(name, options, environment(name, options))
with behind("shelf", Path(), 1 << 20) as pool:
    print(pool.settings["pool.shelf.code"], pool.options["board"], pool.remark)
"""
    done = run("-c", use)
    assert done.stdout.splitlines() == [
        "shelf {'board': 'ash', 'code': '', 'timeout_ms': 5000} {'SHELF_BOARD': 'ash'}",
        "1234 pine a toy",
    ], done.stderr

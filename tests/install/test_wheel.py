"""The wheel, built and installed as a user would: no compiler, no torch, an environment of its own.

Needs an index of packages, and some minutes.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import layerflow
from layerflow_cli.errors import NO_TORCH

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 160 << 20
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))}
    return subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="module")
def environment(folder: Path) -> Path:
    """A new virtual environment, whose programs are all that its user's PATH has."""
    made = run([sys.executable, "-m", "venv", "venv"], folder)
    assert made.returncode == 0, made.stderr
    return folder / "venv"


def build(folder: Path, path: str) -> Path:
    """The wheel of this source tree, built where PATH is `path`."""
    ignored = shutil.ignore_patterns(".*", "build", "out", "__pycache__", "*.egg-info", "*.so", "tests", "bench")
    source, wheels = folder / "source", folder / "wheels"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=ignored)
    built = run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, "."],
        source,
        PATH=path,
        HOME=str(folder),
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(folder: Path, environment: Path) -> Path:
    wheel = build(folder, str(environment / "bin"))
    assert wheel.name == f"layerflow-{layerflow.__version__}-cp311-abi3-linux_{platform.machine()}.whl"
    done = run([environment / "bin" / "python", "-m", "pip", "install", "-q", wheel], folder, PATH="", HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return environment


def command(installed: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run([installed / "bin" / "layerflow", *args], folder, PATH=str(installed / "bin"), HOME=str(folder))


def test_it_is_small_and_brings_no_torch(installed):
    files = [path for path in installed.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if path.parent.name == "torch"]
    assert not list(installed.rglob("_copy*.so"))
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_its_commands_run(installed, folder):
    assert command(installed, folder, "--version").stdout == f"layerflow {layerflow.__version__}\n"
    assert json.loads(command(installed, folder, "config", "--json").stdout)
    assert "handoff_share" in command(installed, folder, "config", "--profile", "pd").stdout
    doctor = command(installed, folder, "doctor", "--set", "pool.size=1MiB", "--set", "server.http_port=-1")
    assert doctor.returncode == 0 and "the C loop is not built" in doctor.stdout, doctor.stdout + doctor.stderr
    refused = command(installed, folder, "demo", "--quick")
    assert (refused.returncode, refused.stderr) == (2, f"layerflow: {NO_TORCH}\n")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_with_a_compiler_it_has_the_copy_loop_for_every_python(folder):
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    wheel = build(folder, os.environ["PATH"])
    listed = run([sys.executable, "-m", "zipfile", "-l", wheel], folder)
    assert "layerflow/ops/_copy.abi3.so" in listed.stdout

"""The environment of host processes, without any native package."""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
from pathlib import Path

import pytest

from layerflow.errors import Unsupported
from layerflow.hosts.environment import environment
from layerflow.hosts.memcache.environment import emulator


@pytest.fixture
def memfabric(monkeypatch, tmp_path) -> Path:
    """As if the package were installed there."""
    spec = importlib.machinery.ModuleSpec("memfabric_hybrid", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "memfabric_hybrid")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return tmp_path / "memfabric_hybrid" / "lib"


@pytest.mark.parametrize("backend", ["disk", "mooncake"])
def test_the_others_need_nothing(backend):
    assert environment(backend, {"path": "/somewhere"}) == {}


def test_the_package_s_libraries_come_before_the_server_s(memfabric, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine:/ours")
    assert environment("memcache", {}) == {"LD_LIBRARY_PATH": f"{memfabric}:/mine:/ours"}
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert environment("memcache", {}) == {"LD_LIBRARY_PATH": str(memfabric)}


def test_without_the_package_nothing_is_added(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert environment("memcache", {}) == {}


def test_an_emulator_that_is_built(memfabric, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    (tmp_path / "cann" / "lib64").mkdir(parents=True)
    (tmp_path / "cann" / "lib64" / "libascendcl.so").touch()
    variables = environment("memcache", {"cann_emulator": str(tmp_path / "cann")})
    assert variables["ASCEND_HOME_PATH"] == str(tmp_path / "cann")
    assert variables["LD_PRELOAD"] == f"{tmp_path}/cann/lib64/libdriver_version.so:/mine.so"
    assert variables["LD_LIBRARY_PATH"].startswith(f"{tmp_path}/cann/lib64:{memfabric}")


def test_an_emulator_that_is_not_built_is_built_once_into_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "cann" / "build.sh"
    script.parent.mkdir()
    script.write_text(
        '[ -e "$1/lib64/libascendcl.so" ] && exit; mkdir -p "$1/lib64" && echo built >"$1/lib64/libascendcl.so"'
    )
    built = emulator(script.parent)
    assert built.is_relative_to(tmp_path / "cache")
    assert (built / "lib64" / "libascendcl.so").read_text() == "built\n"
    assert emulator(script.parent) == built


def test_nobody_else_builds_while_what_a_build_has_left_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "build.sh").write_text(f"read -r line >/dev/null 2>&1 <{gate} & exit 1")
    with pytest.raises(Unsupported):
        emulator(tmp_path)
    [path] = tmp_path.glob("cache/layerflow/*/.lock")
    with open(path, "w") as lock:
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            gate.write_text("go on\n")
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.parametrize(("script", "says"), [(None, "neither"), ("echo no compiler >&2; exit 1", "no compiler")])
def test_an_emulator_that_cannot_be_built(monkeypatch, tmp_path, script, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if script:
        (tmp_path / "build.sh").write_text(script)
    with pytest.raises(Unsupported, match=says):
        environment("memcache", {"cann_emulator": str(tmp_path)})

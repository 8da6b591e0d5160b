"""Backends are found by their entry points."""

import ast
import contextlib
import re
import socket
import sys
from pathlib import Path

import pytest

import layerflow
import layerflow_cli
from layerflow import backends, findings
from layerflow.backends import Plugin, canonical, installed, named
from layerflow.config.fields import BackendOptions
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, Unsupported
from layerflow.hosts.backend import Backend, Unusable
from layerflow.hosts.process import make


@pytest.mark.parametrize("name", ["disk", "memcache", "mooncake", "redis"])
def test_ours_are_installed_and_what_each_names_is_there(name):
    plugin = installed()[name]
    assert issubclass(named(plugin.backend), Backend)
    for reference in filter(None, (plugin.environment, plugin.examine, plugin.trial)):
        assert callable(named(reference))
    assert plugin.examine, "the doctor looks at each of ours"
    assert not plugin.chosen_by or plugin.chosen_by in plugin.options.model_fields


@pytest.mark.parametrize("name", ["memcache", "mooncake"])
def test_a_trial_without_its_package_says_in_one_line_what_to_install(monkeypatch, tmp_path, name):
    monkeypatch.setattr(findings, "has_module", lambda module: False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    plugin = installed()[name]
    with pytest.raises(Unsupported, match=r"pip install [a-z_-]+") as caught:
        named(plugin.trial)(plugin.options(), tmp_path, 1 << 20, False)
    assert "\n" not in str(caught.value)


def test_an_alias_is_another_name():
    assert canonical("memcache_hybrid") == "memcache"
    assert canonical("redis") == "redis" and canonical("nosuch") == "nosuch"


def test_a_backend_of_another_package_is_made_by_its_name(monkeypatch, tmp_path):
    theirs = Plugin(backend="layerflow.hosts.disk.backend:Disk", options=BackendOptions)
    monkeypatch.setattr("layerflow.hosts.process.installed", lambda: {"theirs": theirs})
    made = make("theirs", {"path": str(tmp_path), "capacity": 1 << 20})
    assert type(made).__name__ == "Disk"


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(Unusable, match=r"there are .*mooncake"):
        make("nosuch", {})


class Entry:
    name, value = "odd", "odd:thing"

    def __init__(self, thing=None):
        self._thing = thing

    def load(self):
        if self._thing is None:
            raise ModuleNotFoundError("No module named 'odd'")
        return self._thing


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (object(), "odd:thing is no Plugin"),
        (None, "odd:thing cannot be imported: ModuleNotFoundError: No module"),
    ],
)
def test_a_broken_backend_takes_nothing_else_down_and_is_refused_by_name(monkeypatch, thing, why):
    monkeypatch.setattr(backends, "entry_points", lambda group: [Entry(thing)])
    monkeypatch.setattr(backends, "_loaded", backends._loaded.__wrapped__)
    assert backends.installed.__wrapped__() == {}
    broken = backends.broken.__wrapped__()
    assert re.match(why, broken["odd"])
    monkeypatch.setattr("layerflow.config.pool.broken", lambda: broken)
    with pytest.raises(ConfigError, match=why):
        Settings.load(None, {"pool.backend": "odd"})


def test_nothing_but_a_backend_itself_asks_for_its_name():
    """No comparison, no case and no key of a table names one, outside of its own folder or file."""
    asked = []
    for package in (layerflow, layerflow_cli):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            place = path.relative_to(root)
            if place.parts[0] == "hosts" and place.parts[1].removesuffix(".py") in installed():
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    constants = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
                elif isinstance(node, ast.MatchValue):
                    constants = [node.value]
                elif isinstance(node, ast.Dict):
                    constants = [key for key in node.keys if key is not None]
                else:
                    continue
                named = {each.value for each in constants if isinstance(each, ast.Constant)}
                asked += [f"{place}:{node.lineno} {name}" for name in named & set(installed())]
    assert not asked


def test_ports_for_programs_that_are_told_theirs_are_none_that_the_kernel_gives_away() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = backends.free_ports(40)
    assert len(set(ports)) == 40 and not [port for port in ports if low <= port <= high]
    with contextlib.ExitStack() as held:
        for port in ports:  # and nobody listens there
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(backends.free_ports(40)) & set(ports)


def test_where_the_kernel_gives_all_ports_away_its_own_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "range"
    told.write_text("1024\t65535\n")
    monkeypatch.setattr(backends, "_EPHEMERAL", told)
    assert len(set(backends.free_ports(5))) == 5

"""Backends are found by their entry points."""

import pytest

from layerflow import backends
from layerflow.backends import Plugin, canonical, installed, named
from layerflow.config.fields import BackendOptions
from layerflow.hosts.backend import Backend, Unusable
from layerflow.hosts.registry import make


@pytest.mark.parametrize("name", ["disk", "memcache", "mooncake", "redis"])
def test_ours_are_installed_and_what_each_names_is_there(name):
    plugin = installed()[name]
    assert issubclass(named(plugin.backend), Backend)
    for reference in filter(None, (plugin.environment, plugin.examine, plugin.trial)):
        assert callable(named(reference))
    assert plugin.examine, "the doctor looks at each of ours"
    assert not plugin.chosen_by or plugin.chosen_by in plugin.options.model_fields


def test_an_alias_is_another_name():
    assert canonical("memcache_hybrid") == "memcache"
    assert canonical("redis") == "redis" and canonical("nosuch") == "nosuch"


def test_a_backend_of_another_package_is_made_by_its_name(monkeypatch, tmp_path):
    theirs = Plugin(backend="layerflow.hosts.disk.backend:Disk", options=BackendOptions)
    monkeypatch.setattr("layerflow.hosts.registry.installed", lambda: {"theirs": theirs})
    made = make("theirs", {"path": str(tmp_path), "capacity": 1 << 20})
    assert type(made).__name__ == "Disk"


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(Unusable, match=r"there are .*mooncake"):
        make("nosuch", {})


def test_an_entry_point_that_is_no_plugin_is_refused(monkeypatch):
    class Entry:
        name, value = "odd", "odd:thing"

        def load(self):
            return object()

    monkeypatch.setattr(backends, "entry_points", lambda group: [Entry()])
    with pytest.raises(TypeError, match="odd = odd:thing"):
        backends.installed.__wrapped__()

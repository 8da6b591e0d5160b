"""Backends are found by their entry points."""

import importlib

import pytest

from layerflow import backends
from layerflow.backends import Plugin, installed
from layerflow.hosts.backend import Unusable
from layerflow.hosts.registry import make


def test_ours_are_installed_and_each_names_a_class():
    assert {"disk", "memcache", "mooncake"} <= set(installed())
    for plugin in installed().values():
        module, _, cls = plugin.backend.partition(":")
        assert hasattr(importlib.import_module(module), cls)


def test_a_backend_of_another_package_is_made_by_its_name(monkeypatch, tmp_path):
    theirs = Plugin("layerflow.hosts.disk.backend:Disk")
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

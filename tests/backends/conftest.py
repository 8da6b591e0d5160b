"""Tests against the real backends: they need packages that `make test` does without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.conftest import serve

__all__ = ["serve"]
HERE = Path(__file__).parent

# Their helpers import the packages: without tests/backends/run.sh (make test-backends) nothing here is collected.
collect_ignore_glob = [] if os.environ.get("LAYERFLOW_TEST_BACKENDS") == "1" else ["*"]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests share servers, so that one process runs them; only one MetaService can run on a machine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            memcache = "memcache" in item.nodeid
            item.add_marker(pytest.mark.xdist_group("memcache" if memcache else item.path.stem))

"""Tests against the real backends: they need packages that `make test` does without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.conftest import serve

__all__ = ["serve"]
HERE = Path(__file__).parent

SHARE = os.environ.get("LAYERFLOW_TEST_BACKENDS", "")
"""Which of them run: "memcache", "others", or "all"."""

# Their helpers import the packages: without tests/backends/run.sh (make test-backends) nothing here is collected.
collect_ignore_glob = [] if SHARE else ["*"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only one MetaService can run on a machine, so that its tests have a process of their own."""
    if SHARE == "all":
        return
    there = {item: "memcache" in item.nodeid for item in items if item.path.is_relative_to(HERE)}
    left_out = [item for item, memcache in there.items() if memcache != (SHARE == "memcache")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]

"""Tests against the real backends: they need packages that `make test` does without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.conftest import serve

__all__ = ["serve"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LAYERFLOW_TEST_BACKENDS") == "1":
        return
    skip = pytest.mark.skip(reason="run tests/backends/run.sh (make test-backends)")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)

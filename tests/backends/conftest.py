"""Tests against the real backends: they need packages that `make test` does without."""

from __future__ import annotations

import os

from e2e.conftest import serve

__all__ = ["serve"]

# Their helpers import the packages: without tests/backends/run.sh (make test-backends) nothing here is collected.
collect_ignore_glob = [] if os.environ.get("LAYERFLOW_TEST_BACKENDS") == "1" else ["*"]

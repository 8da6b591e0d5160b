"""Short and long forms of one test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FIGURES = "LAYERFLOW_E2E_FIGURES"
"""Where measured figures go: one JSON object a line is appended to this file; unset = they are only printed."""


def rounds(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrise `rounds`: `short` in every run, `long` in a campaign."""
    marks = (pytest.mark.campaign, pytest.mark.timeout(3600))
    return pytest.mark.parametrize("rounds", [short, pytest.param(long, marks=marks)])


def record(test: str, **figures: Any) -> None:
    """Keep what was measured; figures are never asserted on."""
    line = json.dumps({"test": test} | figures)
    print(line)
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(line + "\n")

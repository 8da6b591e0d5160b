"""The process that keeps the disk tier is killed and stopped under load: nothing is wrong, nobody else is hurt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.host_faults import ARENA, kill_hosts, stop_host
from e2e.rounds import rounds
from layerflow_cli.bench.harness import ServerProcess


@rounds(5, 50)
def test_a_killed_host(serve: Callable[..., ServerProcess], tmp_path: Path, rounds: int) -> None:
    kill_hosts(serve(pool__size=ARENA, pool__disk__path=tmp_path / "tier"), rounds, "disk")


@pytest.mark.parametrize(
    ("stops", "watched_s"), [(1, 4.0), pytest.param(3, 10.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])]
)
def test_a_stopped_host(serve: Callable[..., ServerProcess], tmp_path: Path, stops: int, watched_s: float) -> None:
    stop_host(serve(pool__size=ARENA, pool__disk__path=tmp_path / "tier"), stops, watched_s, "disk")

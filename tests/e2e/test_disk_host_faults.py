"""The disk tier's process is killed and stopped under load, its folder is late: nothing is wrong, nobody is hurt."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.host_faults import ARENA, arrive_later, kill_hosts, stop_host
from e2e.rounds import record, rounds
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports

CAPACITY = 256 << 20


@pytest.fixture(autouse=True)  # made before the servers that write to it, so that they have ended when it goes
def folder(tmp_path: Path) -> Iterator[Path]:
    """Not left behind: it may get large."""
    yield tmp_path / "tier"
    shutil.rmtree(tmp_path)


@rounds(5, 50)
def test_a_killed_host(serve: Callable[..., ServerProcess], folder: Path, rounds: int) -> None:
    kill_hosts(serve(pool__size=ARENA, pool__disk__path=folder, pool__disk__capacity=CAPACITY), rounds, "disk")


@rounds(3, 30)
def test_a_killed_host_over_a_slow_link(serve: Callable[..., ServerProcess], folder: Path, rounds: int) -> None:
    """1 MB over 40 MB/s: steps still copy their first layers when the fetch of the rest dies. Two groups of layers."""
    server = serve(
        pool__size=ARENA,
        pool__disk__path=folder,
        pool__disk__capacity=CAPACITY,
        pool__link_gbps=0.04,
        transfer__max_transfer_bytes="64KiB",
        transfer__max_inflight_bytes="256KiB",
    )
    kill_hosts(server, rounds, "disk_slow_link", window=64)


@pytest.mark.parametrize(
    ("stops", "watched_s"), [(1, 4.0), pytest.param(3, 10.0, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])]
)
def test_a_stopped_host(serve: Callable[..., ServerProcess], folder: Path, stops: int, watched_s: float) -> None:
    stop_host(serve(pool__size=ARENA, pool__disk__path=folder, pool__disk__capacity=CAPACITY), stops, watched_s, "disk")


def test_a_folder_that_comes_later(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    port, mount = held_ports(1)[0], tmp_path / "mount"
    server = serve(pool__disk__path=mount / "tier", server__http_port=port)
    took = arrive_later(server, port, "does not exist", mount.mkdir, 60)
    record("disk_comes_later", attached_s=round(took, 3))

"""Benches for the host's threads, the path by which a host finds the fake backend, and services that only listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.answers import Answers
from hosts.bench import PATIENCE_S, Bench, MakeBench, Seen
from layerflow.hosts.disk import backend as disk
from layerflow.hosts.shared import service
from layerflow.system.memfd import SharedMemory

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench() -> Iterator[MakeBench]:
    """Benches; their lanes are stopped at the end. Gates are opened for good first."""
    made: list[Bench] = []

    def make(nbytes: int = 1 << 20, gated: tuple[str, ...] = (), **options: Any) -> Bench:
        arena = SharedMemory.create(nbytes)
        backend = Seen(options, gated)
        backend.attach(arena, lambda keys: None)
        backend.calls.get()
        made.append(Bench(arena, backend))
        return made[-1]

    yield make
    for one in made:
        for gate in one.backend.gates.values():
            gate.release(1000)
        assert one.lane is None or one.lane.stop(PATIENCE_S)
        one.arena.close()


@pytest.fixture(autouse=True)
def _read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder holds is known when a disk tier of this process is attached, however late its thread is."""
    monkeypatch.setattr(disk, "SCAN_PATIENCE_S", PATIENCE_S)


@pytest.fixture
def fake_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host started now can import the fake backend."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A service that accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setattr(service, "HTTP_S", PATIENCE_S)
    with Answers() as answers:
        yield answers

"""Loads of this process's agents that stand still where a test wants them."""

from __future__ import annotations

import threading

import pytest

from e2e.known import PATIENCE_S
from layerflow.agent.lanes.load import LoadLane
from layerflow.agent.lanes.task import CopyTask


def hold_loads(monkeypatch: pytest.MonkeyPatch, layer: int) -> threading.Event:
    """Loads stay on the link from this layer on, until the event is set."""
    go_on, passes = threading.Event(), LoadLane._pass

    def held(lane: LoadLane, job: CopyTask) -> None:
        if job.batch.layer >= layer:
            go_on.wait(PATIENCE_S)
        passes(lane, job)

    monkeypatch.setattr(LoadLane, "_pass", held)
    return go_on

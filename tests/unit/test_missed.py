"""What is remembered of turns that were missed."""

from __future__ import annotations

import pytest

from layerflow.server import planner as saves
from layerflow.server.planner import MissedTurns


def test_the_oldest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MOST_MISSED", 3)
    turns = MissedTurns()
    turns.add([b"a", b"b"])
    turns.add([b"c", b"a", b"d"])
    assert len(turns) == 3 and b"b" not in turns and b"a" in turns
    turns.drop([b"a", b"z"])
    assert len(turns) == 2 and b"a" not in turns

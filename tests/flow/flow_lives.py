"""Where every record of the core was after the event before, and that it has come from there by its table."""

from __future__ import annotations

from layerflow.flow.graph import JOB_LIFE, OBJECT_LIFE, PART_LIFE, IncomingObjectState, JobState, PartState
from layerflow.flow.machine import Flow

LIVES = {JobState: JOB_LIFE, PartState: PART_LIFE, IncomingObjectState: OBJECT_LIFE}


class Lives:
    def __init__(self) -> None:
        self._last = {}

    def look(self, flow: Flow) -> None:
        now = flow.lives()
        for name, state in now.items():
            before = self._last.get(name, state)
            assert LIVES[type(state)].leads(before, state), f"{name}: {before} became {state}"
        self._last = now

"""A reference engine: a small real transformer on a paged cache, and the glue that engine authors can copy.

``Engine`` works on its own; :mod:`layerflow_engine.glue` connects it to a layerflow server.
"""

from __future__ import annotations

from layerflow_engine.config import PRESETS, EngineConfig
from layerflow_engine.connection import Connection, NullConnection
from layerflow_engine.engine import Engine, StepReport
from layerflow_engine.request import Result

__all__ = ["PRESETS", "Connection", "Engine", "EngineConfig", "NullConnection", "Result", "StepReport"]

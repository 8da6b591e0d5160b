"""A reference engine: a small real transformer on a paged cache, and the glue that engine authors can copy.

``Engine`` works on its own; :mod:`layerflow.engine.glue` connects it to a layerflow server.
"""

from layerflow.engine.config import PRESETS, EngineConfig
from layerflow.engine.connection import Connection, NullConnection
from layerflow.engine.engine import Engine, StepReport
from layerflow.engine.request import Result

__all__ = ["PRESETS", "Connection", "Engine", "EngineConfig", "NullConnection", "Result", "StepReport"]

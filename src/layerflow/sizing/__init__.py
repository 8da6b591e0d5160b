"""What a model's KV cache takes, before an engine has run: from its ``config.json`` to the settings of a server."""

from layerflow.sizing.break_even import Race, race
from layerflow.sizing.capacity import Capacity, capacity_of
from layerflow.sizing.settings import PlannedFile, planned_file
from layerflow.sizing.shapes import Shape, model_of, read_config, shape_of

__all__ = [
    "Capacity",
    "PlannedFile",
    "Race",
    "Shape",
    "capacity_of",
    "model_of",
    "planned_file",
    "race",
    "read_config",
    "shape_of",
]

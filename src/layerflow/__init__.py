"""layerflow moves the KV cache of LLM serving engines layer by layer, hidden behind attention compute.

The public surface. Names are imported when first asked for: what needs torch costs only those who use it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from layerflow._lazy import attribute
from layerflow._version import __version__ as __version__

if TYPE_CHECKING:
    from layerflow.agent import (
        Agent,
        AsyncAgent,
        AsyncStep,
        ClientKeys,
        Control,
        Ended,
        FailedBlocks,
        Hit,
        LoadResult,
        Mode,
        NoStep,
        Step,
        StepRequest,
    )
    from layerflow.config.settings import Settings
    from layerflow.errors import LayerflowError
    from layerflow.keys import Chain, Media
    from layerflow.server import EmbeddedServer, Server
    from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

_HOMES = {
    "layerflow.agent": (
        "Agent",
        "AsyncAgent",
        "AsyncStep",
        "ClientKeys",
        "Control",
        "Ended",
        "FailedBlocks",
        "Hit",
        "Mode",
        "NoStep",
        "LoadResult",
        "Step",
        "StepRequest",
    ),
    "layerflow.config.settings": ("Settings",),
    "layerflow.errors": ("LayerflowError",),
    "layerflow.keys": ("Chain", "Media"),
    "layerflow.server": ("EmbeddedServer", "Server"),
    "layerflow.spec": ("GroupSpec", "ModelSpec", "Plane", "Shard"),
}
_RENAMED = {"Outcome": "LoadResult"}
"""Old public names, kept for one release."""

__all__ = [
    "Agent",
    "AsyncAgent",
    "AsyncStep",
    "Chain",
    "ClientKeys",
    "Control",
    "EmbeddedServer",
    "Ended",
    "FailedBlocks",
    "GroupSpec",
    "Hit",
    "LayerflowError",
    "LoadResult",
    "Media",
    "Mode",
    "ModelSpec",
    "NoStep",
    "Plane",
    "Server",
    "Settings",
    "Shard",
    "Step",
    "StepRequest",
]


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        warnings.warn(f"layerflow.{name} is now layerflow.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    return attribute(__name__, _HOMES, name)

"""Which caches can be simulated."""

from __future__ import annotations

from layerflow.errors import ConfigError
from layerflow.spec import ModelSpec

SIMULATED = ("full", "mla")


def refuse_kinds(spec: ModelSpec) -> None:
    """Refuse what a hit needs less of than all chunks: windows, recurrent states, compressed rows.

    :raises ConfigError: naming what the model has.
    """
    others = sorted({group.kind for group in spec.groups if group.kind not in SIMULATED or group.ratio > 1})
    if others:
        raise ConfigError(
            f"model {spec.name!r} has caches that are not simulated yet ({', '.join(others)}): of the kinds "
            f"{' and '.join(SIMULATED)} alone"
        )

"""Which caches can be simulated."""

from __future__ import annotations

from layerflow.errors import ConfigError
from layerflow.spec import GroupSpec, ModelSpec

SIMULATED = ("full", "mla")


def refuse_kinds(spec: ModelSpec) -> None:
    """Refuse what a hit needs less of than all chunks: windows, recurrent states, compressed rows.

    :raises ConfigError: naming what the model has.
    """
    others = sorted({_what(group) for group in spec.groups if group.kind not in SIMULATED or group.ratio > 1})
    if others:
        raise ConfigError(
            f"model {spec.name!r} has caches that are not simulated yet ({', '.join(others)}): only "
            f"{' and '.join(SIMULATED)} are, with a row for each token"
        )


def _what(group: GroupSpec) -> str:
    return f"{group.kind} with a row for every {group.ratio} tokens" if group.ratio > 1 else group.kind

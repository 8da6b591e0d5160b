"""Options that several commands share, and ``--set key=value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from layerflow.errors import ConfigError

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", envvar="LAYERFLOW_CONFIG", help="TOML file with settings."),
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="Control socket, e.g. ipc:///run/layerflow/control.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")]


def assignments(items: Sequence[str]) -> dict[str, str]:
    """``["pool.size=4GiB"]`` as a dict.

    :raises ConfigError: for an item without ``=``, or a key given twice.
    """
    values: dict[str, str] = {}
    for item in items:
        key, found, value = item.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"--set {item}: write it as key=value")
        if key.strip() in values:
            raise ConfigError(f"--set {key.strip()} is given twice; keep one")
        values[key.strip()] = value.strip()
    return values


def overrides(sets: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line sets: ``--set`` items, then flags that were given (not None).

    :raises ConfigError: see :func:`assignments`.
    """
    return {**assignments(sets), **{key: value for key, value in flags.items() if value is not None}}

"""Short files of settings for kinds of machines, to be copied and edited: ``layerflow config --profile NAME``."""

from __future__ import annotations

from importlib.resources import files

from layerflow.errors import ConfigError

_SUFFIX = ".toml"


def names() -> list[str]:
    """Return which there are."""
    return sorted(
        found.name.removesuffix(_SUFFIX) for found in files(__name__).iterdir() if found.name.endswith(_SUFFIX)
    )


def text(name: str) -> str:
    """Return a profile as TOML.

    :raises ConfigError: there is none of that name.
    """
    if name not in names():
        raise ConfigError(f"--profile {name}: no such profile; there are {', '.join(names())}")
    return files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")

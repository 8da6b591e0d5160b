"""What a backend needs in its process's environment before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerflow.backends import installed, named


def takes_long(backend: str) -> bool:
    """Whether :func:`environment` may wait: a backend may have something built, or wait for who builds it."""
    return bool(_function(backend))


def environment(backend: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Variables to add to the server's own; those that are lists contain the server's. Imports nothing native.

    :param backend: the backend's name.
    :param options: its section of the configuration.
    :raises Unsupported: what they ask for cannot be had on this machine.
    """
    function = _function(backend)
    return dict(named(function)(options)) if function else {}


def _function(backend: str) -> str:
    plugin = installed().get(backend)
    return plugin.environment if plugin is not None else ""

"""Which backends there are. None is imported before it is wanted."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from layerflow.hosts.backend import Backend, Unusable
from layerflow.hosts.lane import describe

BACKENDS: Mapping[str, str] = {
    "disk": "layerflow.hosts.disk.backend:Disk",
    "memcache": "layerflow.hosts.memcache.backend:Memcache",
    "mooncake": "layerflow.hosts.mooncake.backend:Mooncake",
}


def make(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend that is not attached yet.

    :param name: one of :data:`BACKENDS`, or ``module:Class`` (for tests; the configuration knows names only).
    :raises Unusable: there is none of that name, or it refuses its options.
    """
    module, _, cls = BACKENDS.get(name, name).partition(":")
    if not cls:
        raise Unusable(f"backend {name!r} is unknown; choose one of {', '.join(sorted(BACKENDS))}")
    try:
        factory = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"backend {name!r} cannot be loaded: {error}; is layerflow installed whole?") from error
    try:
        made = factory(options)
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"backend {name!r} cannot work with its options: {describe(error)}; see its section") from error
    if not isinstance(made, Backend):
        raise Unusable(f"{name!r} is no backend")
    return made

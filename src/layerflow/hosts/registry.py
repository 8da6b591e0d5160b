"""Makes a backend by its name. None is imported before it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerflow.backends import installed, named
from layerflow.hosts.backend import Backend, Unusable
from layerflow.hosts.lanes.lane import describe


def make(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend that is not attached yet.

    :param name: an installed one, or ``module:Class`` (for tests; the configuration knows names only).
    :raises Unusable: there is none of that name, or it refuses its options.
    """
    known = installed()
    reference = known[name].backend if name in known else name
    if ":" not in reference:
        there = ", ".join(known) or "none: install layerflow again, so that its entry points are known"
        raise Unusable(f"backend {name!r} is not installed; there are {there}")
    try:
        factory = named(reference)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"backend {name!r} cannot be loaded: {error}; is layerflow installed whole?") from error
    try:
        made = factory(options)
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"backend {name!r} cannot work with its options: {describe(error)}; see its section") from error
    if not isinstance(made, Backend):
        raise Unusable(f"{name!r} is no backend")
    return made

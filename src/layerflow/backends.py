"""Which backends are installed: the entry points of the group ``layerflow.backends``, one :class:`Plugin` each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from pydantic import BaseModel

GROUP = "layerflow.backends"


@dataclass(frozen=True, slots=True)
class Plugin:
    """What layerflow knows of a backend before a host process loads it. Its module imports nothing native.

    :param backend: ``module:Class`` of the :class:`layerflow.hosts.backend.Backend`, loaded in the host process only.
    :param options: its section ``[pool.NAME]``, chosen by ``pool.backend = NAME``; None = the configuration knows it.
    """

    backend: str
    options: type[BaseModel] | None = None


@functools.cache
def installed() -> Mapping[str, Plugin]:
    """The backends of every installed package, by name.

    :raises TypeError: an entry point names something else than a :class:`Plugin`.
    """
    found: dict[str, Plugin] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        plugin = entry.load()
        if not isinstance(plugin, Plugin):
            raise TypeError(f"entry point {entry.name} = {entry.value} of {GROUP} is no Plugin; mend its package")
        found[entry.name] = plugin
    return found

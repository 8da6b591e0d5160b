"""Which backends are installed: the entry points of the group ``layerflow.backends``, one :class:`Plugin` each."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel

GROUP = "layerflow.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What layerflow knows of a backend before a host process loads it. Its module imports nothing native.

    Functions are named as ``module:function`` and imported where they are called. docs/backends.md describes each.

    :param backend: ``module:Class`` of the :class:`layerflow.hosts.backend.Backend`, loaded in the host process only.
    :param options: a :class:`layerflow.config.fields.BackendOptions`: its section ``[pool.NAME]``.
    :param aliases: other names that ``pool.backend`` takes for it.
    :param chosen_by: a key of its section that chooses it by itself, where ``pool.backend`` is ``memory``; "" = none.
    :param environment: takes its section as a dict, returns the variables that its host process needs. May block.
    :param examine: takes the pool's settings and whether the server runs, yields :class:`layerflow.findings.Finding`.
        Loads no native library.
    :param trial: says how ``layerflow demo`` and ``layerflow bench`` start what it needs; see
        :class:`layerflow.hosts.trial.Trial`.
    """

    backend: str
    options: type[BaseModel]
    aliases: tuple[str, ...] = ()
    chosen_by: str = ""
    environment: str = ""
    examine: str = ""
    trial: str = ""


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


def canonical(name: str) -> str:
    """The backend's own name for one of its aliases; any other name as it is."""
    return next((own for own, plugin in installed().items() if name in plugin.aliases), name)


def named(reference: str) -> Any:
    """What ``module:name`` names, imported now.

    :raises ImportError: there is no such module.
    :raises AttributeError: it has nothing of that name.
    """
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)

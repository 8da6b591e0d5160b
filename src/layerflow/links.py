"""Which links there are between the arenas of two servers: the modules of :mod:`layerflow.hosts.peer.links`.

A link is one file (or folder) there, with a :class:`LinkPlugin` named ``LINK``; nothing else knows its name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "layerflow.hosts.peer.links"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlugin:
    """What layerflow knows of a link before a host process loads it. Its module imports nothing native.

    Functions are named as ``module:function``.

    :param reader: ``(arena, origin, until) -> PeerLink``: the importer's end, connected.
    :param lender: ``(arena, host) -> Lender``: the exporter's end, bound to that host where it can be.
    :param plane: ``module:Class``, the :class:`~layerflow.hosts.peer.windowed.TransferLibrary` of a windowed link; "" =
        it is none.
    :param maps_arena: its processes map the arena. False: they know its descriptor, and copy from or to it.
    :param trusts_network: whoever reaches its data plane may read and write what it has registered.
    :param package: that pip installs for it; "" = none. :param version: the first one that will do.
    :param library: its top-level module; "" = none. :param probe: what of it has to be importable.
    """

    reader: str
    lender: str
    plane: str = ""
    maps_arena: bool = True
    trusts_network: bool = False
    package: str = ""
    version: str = ""
    library: str = ""
    probe: str = ""


@functools.cache
def link_names() -> tuple[str, ...]:
    """Sorted. Imports no link."""
    spec = importlib.util.find_spec(PACKAGE)
    where = spec.submodule_search_locations if spec is not None else None
    return tuple(sorted(module.name for module in pkgutil.iter_modules(where)))


@functools.cache
def links() -> Mapping[str, LinkPlugin]:
    """By name, sorted."""
    return {name: importlib.import_module(f"{PACKAGE}.{name}").LINK for name in link_names()}

"""Which backends are installed: the entry points of the group ``layerflow.backends``, one :class:`Plugin` each."""

from __future__ import annotations

import functools
import importlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
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
    :param environment: ``(options as a dict) -> dict``: variables that its host process needs. May block.
    :param examine: ``(options, pool, running) -> Iterator[Finding]``: what ``layerflow doctor`` says of it, given its
        section, the pool's settings and whether the server runs. Loads no native library.
    :param trial: ``(options, folder, nbytes, running) -> Trial``: how demo and bench start what it needs. They give its
        section as the user wrote it, an empty folder for the service, bytes of objects that shall find room, and
        whether the section names a service that runs, so that none is started.
    """

    backend: str
    options: type[BaseModel]
    aliases: tuple[str, ...] = ()
    chosen_by: str = ""
    environment: str = ""
    examine: str = ""
    trial: str = ""


LEAST_TRIAL_BYTES = 64 << 20
"""That a pool of a trial, or a client of one, holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A service that ``layerflow demo`` or ``layerflow bench`` starts, and clients of it.

    :param options: keys of the backend's section, over those that the user gave.
    :param other: what differs from these for a second client of the same pool.
    :param command: starts the service, in the backend's environment; () = there is nothing to start.
    :param ready: what answers once it can be used, ``http://host:port/path`` or ``unix:///path``.
    :param page: where the service counts its requests, ``http://host:port/path``; "" = nowhere.
    :param requests: a regular expression for that page; its only group is a number of metadata requests.
    :param remark: what of it is emulated; "" = nothing.
    :param made: a directory to remove afterwards.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    ready: str = ""
    page: str = ""
    requests: str = ""
    remark: str = ""
    made: Path | None = None


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@functools.cache
def installed() -> Mapping[str, Plugin]:
    """The backends of every installed package, by name, less :func:`broken` ones."""
    return {name: plugin for name, plugin in _loaded().items() if isinstance(plugin, Plugin)}


@functools.cache
def broken() -> Mapping[str, str]:
    """Installed backends that cannot be used, and why. They take nothing else down with them."""
    return {name: why for name, why in _loaded().items() if isinstance(why, str)}


@functools.cache
def _loaded() -> Mapping[str, Plugin | str]:
    found: dict[str, Plugin | str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            plugin = entry.load()
        except Exception as error:  # noqa: BLE001 - somebody else's code, whose failure is told by name
            found[entry.name] = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
            continue
        found[entry.name] = plugin if isinstance(plugin, Plugin) else f"{entry.value} is no Plugin"
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

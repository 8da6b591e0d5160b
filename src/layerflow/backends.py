"""Which backends are installed: the entry points of the group ``layerflow.backends``, one :class:`Plugin` each."""

from __future__ import annotations

import errno
import functools
import importlib
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel

GROUP = "layerflow.backends"
_FIRST_PORT, _LAST_PORT = 10_000, 65_535
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    """Ports of this machine that nobody listens on, for programs that cannot choose theirs.

    They lie outside the range out of which the kernel gives ports to who asks for any, and to connections: what is free
    is not taken by those before the program that is told the number has bound it.

    :raises OSError: there are not so many.
    """
    low, high = _ephemeral()
    others = [*range(_FIRST_PORT, low), *range(high + 1, _LAST_PORT + 1)] or list(range(low, high + 1))
    found: list[int] = []
    for port in random.sample(others, len(others)):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
    raise OSError(errno.EADDRNOTAVAIL, f"this machine has fewer than {count} free ports")


def _ephemeral() -> tuple[int, int]:
    """The first and the last port that the kernel gives away."""
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999  # Linux's own
    return low, high


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

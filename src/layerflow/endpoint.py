"""Where servers listen on this machine, asked of the sockets themselves, before a word is said to one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from layerflow.config.settings import default_endpoint, socket_directory
from layerflow.errors import ConfigError, SessionError
from layerflow.system.listening import listener_of, why_not_listening

_ARENA = ".arena"
"""What the socket that hands out shared memory has behind the name of the control socket beside it."""


def check_listened(endpoint: str) -> None:
    """Refuse an ``ipc://`` endpoint at which no process listens; others cannot be looked at.

    :raises SessionError: none does; it names the endpoints of servers that do run.
    """
    if not endpoint.startswith("ipc://"):
        return
    if why := why_not_listening(Path(endpoint.removeprefix("ipc://"))):
        others = [found for found in running_endpoints(endpoint) if found != endpoint]
        advice = f"servers listen at {', '.join(others)}" if others else "start one with `layerflow run`"
        raise SessionError(f"no server at {endpoint}: {why}; {advice}")


def check_free(endpoint: str) -> None:
    """Refuse an ``ipc://`` endpoint at which a process listens already.

    :raises ConfigError: one does.
    """
    if not endpoint.startswith("ipc://"):
        return
    process = listener_of(Path(endpoint.removeprefix("ipc://")))
    if process is not None:
        who = f" (process {process})" if process else ""
        raise ConfigError(
            f"another server is running at {endpoint}{who}; stop it, or give this one a server.endpoint of its own"
        )


def running_endpoints(beside: str) -> Iterator[str]:
    """Endpoints of this user's servers that listen beside this one and in the places of the default endpoint."""
    name = f"layerflow-{os.getuid()}"
    places = (socket_directory(beside), socket_directory(default_endpoint()), Path("/tmp", name),  # noqa: S108
              Path("/run/user", str(os.getuid()), name))  # fmt: skip
    for place in dict.fromkeys(place for place in places if place is not None):
        if not os.access(place, os.R_OK | os.X_OK):
            continue
        for arena in sorted(place.glob(f"*{_ARENA}")):
            control = arena.with_name(arena.name.removesuffix(_ARENA))
            if not why_not_listening(control):
                yield f"ipc://{control}"

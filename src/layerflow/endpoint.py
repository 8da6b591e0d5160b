"""The address of a server's control socket on this machine: how it is written, and whether a server listens there.

That is asked of the sockets themselves, before a word is said to a server, and without what settings need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerflow.errors import ConfigError, SessionError
from layerflow.system.unix_sockets import listener_of, why_not_listening

# sun_path holds 107 bytes and a zero (unix(7)); the arena's socket lies beside the control socket.
MAX_IPC_PATH_BYTES = 100
_ARENA = ".arena"
"""What the socket that hands out shared memory has behind the name of the control socket beside it."""


def default_endpoint() -> str:
    """``ipc://`` in this user's runtime directory; nothing is created."""
    return f"ipc://{os.environ.get('XDG_RUNTIME_DIR') or '/tmp'}/layerflow-{os.getuid()}/control"  # noqa: S108


def socket_directory(endpoint: str) -> Path | None:
    """The directory of an ``ipc://`` endpoint; None for other endpoints, which need none."""
    if not endpoint.startswith("ipc://"):
        return None
    return Path(endpoint.removeprefix("ipc://")).parent


def local_endpoint(value: str) -> str:
    """`value` if it is ``ipc:///path``, the address of a socket on this machine, ``~`` expanded.

    :raises ValueError: it is none, or holds what only a shell or a reader would replace.
    """
    scheme, _, path = value.partition("://")
    if scheme != "ipc" or not path:
        raise ValueError(f'"{value}" should be "ipc:///path/to/socket"')
    path = str(expanded(path))
    for sign in ("$", "<", ">"):
        if sign in path:
            raise ValueError(f'"{value}": {sign} is not replaced by anything; write the path as it is on this machine')
    if path[0] in "@*":
        raise ValueError(
            f'"{value}" is a socket without a private directory, which every user of the machine could reach; '
            'should be "ipc:///path/to/socket"'
        )
    if path[0] != "/":
        raise ValueError(
            f'"{value}" is relative: engines started in another directory would not find it; '
            f'write "ipc://{os.path.abspath(path)}" if you mean that'
        )
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"the socket's path should have at most {MAX_IPC_PATH_BYTES} bytes, a limit of the kernel")
    return f"ipc://{path}"


def expanded(value: Any) -> Any:
    """A path with the home directory that its ``~`` or ``~user`` stands for; anything else as it is.

    :raises ValueError: there is no such user, or a byte 0 in the path.
    """
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ValueError("no path has a byte 0 in it")
    if not value.startswith("~"):
        return value
    found = os.path.expanduser(value)
    if found == value:
        raise ValueError(f"{value.split('/')[0]} is no user with a home directory; write the whole path")
    return found


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

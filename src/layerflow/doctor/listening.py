"""Where the server would listen: the control socket, other hosts' socket, HTTP."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerflow.agent.connection.observer import fetch_status
from layerflow.config.settings import ServerSettings, check_private
from layerflow.endpoint import socket_directory
from layerflow.errors import ConfigError, LayerflowError
from layerflow.findings import Finding, ok, problem, warning
from layerflow.http_server import MAX_CONNECTIONS
from layerflow.system.descriptors import FLOOR
from layerflow.system.listening import why_not_listening
from layerflow.system.machine import existing

STATUS_TIMEOUT_S = 1.5


def running_server(settings: ServerSettings) -> dict[str, Any] | None:
    """The status of the server that answers at the endpoint; None if none does."""
    if not _listened_to(settings.endpoint):
        return None
    try:
        return fetch_status(settings.endpoint, STATUS_TIMEOUT_S)
    except LayerflowError:
        return None


def examine_listening(settings: ServerSettings, running: dict[str, Any] | None) -> Iterator[Finding]:
    """The endpoint's directory, the endpoint, the network socket, the HTTP port.

    :param running: what :func:`running_server` found.
    """
    folder = socket_directory(settings.endpoint)
    if folder is not None:
        yield _directory(folder)
    yield _endpoint(settings.endpoint, running)
    if settings.tcp_endpoint:
        yield from _network(settings)
    if settings.http_port > 0:
        yield _http(settings, running)
    yield _descriptors(settings)


def _listened_to(endpoint: str) -> bool:
    """Whether a process has the socket open; a file that a killed server left behind does not count."""
    if not endpoint.startswith("ipc://"):
        return False
    return not why_not_listening(Path(endpoint.removeprefix("ipc://")))


def _directory(folder: Path) -> Finding:
    check = "endpoint directory"
    if not folder.exists():
        above = existing(folder)
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            return problem(
                check,
                f"{folder} cannot be made: {above} is not writable for this user",
                "set server.endpoint to a directory of yours, or XDG_RUNTIME_DIR",
            )
        return ok(check, f"{folder} will be made")
    try:
        check_private(folder)
    except ConfigError:
        return problem(
            check,
            f"another user owns or can write to {folder}",
            f"chmod 700 {folder}, or give server.endpoint a directory of its own",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return problem(check, f"{folder} is not writable for this user", f"chmod 700 {folder}")
    return ok(check, f"{folder} is private")


def _endpoint(endpoint: str, running: dict[str, Any] | None) -> Finding:
    check = "endpoint"
    if running is not None:
        who = f"layerflow {running.get('version', '?')}, pid {running.get('pid', '?')}"
        return warning(
            check,
            f"a server answers already at {endpoint}: {who}",
            "fine if it is the one you mean; a second one needs another server.endpoint",
        )
    if _listened_to(endpoint):
        return problem(
            check,
            f"a process holds {endpoint} and does not answer as a server of this version",
            "stop it (`fuser` on the socket names it), or set another server.endpoint",
        )
    return ok(check, f"{endpoint} is free")


def _network(settings: ServerSettings) -> Iterator[Finding]:
    check = "network endpoint"
    for key in ("curve_secret_key_file", "curve_allowed_keys_file"):
        path: Path = getattr(settings, key)
        if not os.access(path, os.R_OK) or not path.is_file():
            yield problem(check, f"server.{key}: {path} cannot be read", "make it, readable for this user")
        elif key == "curve_secret_key_file" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield warning(check, f"other users may read the secret key {path}", f"chmod 600 {path}")
    host, _, port = settings.tcp_endpoint.removeprefix("tcp://").rpartition(":")
    why = _taken("0.0.0.0" if host == "*" else host, 0 if port == "*" else int(port))  # noqa: S104 - as configured
    if why:
        yield problem(check, f"{settings.tcp_endpoint}: {why}", "free it, or set another server.tcp_endpoint")
    else:
        yield ok(check, f"{settings.tcp_endpoint} is free")


def _http(settings: ServerSettings, running: dict[str, Any] | None) -> Finding:
    check, place = "http port", f"{settings.http_host}:{settings.http_port}"
    why = _taken(settings.http_host, settings.http_port)
    if not why:
        return ok(check, f"{place} is free")
    if running is not None:
        return warning(check, f"{place}: {why}", "fine if the running server has it; else set server.http_port")
    return problem(check, f"{place}: {why}", "set server.http_port to another one, 0 = any free port, -1 = no HTTP")


def _descriptors(settings: ServerSettings) -> Finding:
    check = "file descriptors"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "raise the hard limit of `ulimit -n` (LimitNOFILE= of a systemd unit)"
    if most == resource.RLIM_INFINITY:
        return ok(check, "without a limit")
    wanted = FLOOR + MAX_CONNECTIONS + 3 * settings.max_sessions + 2 * settings.max_clients
    if most < FLOOR:
        return problem(check, f"a process may have {most}; the server does not start with fewer than {FLOOR}", advice)
    if most < wanted:
        return warning(
            check,
            f"a process may have {most}; server.max_sessions and server.max_clients may take {wanted}: past the limit "
            "nobody new is let in",
            f"{advice}, or lower server.max_sessions and server.max_clients",
        )
    return ok(check, f"a process may have {most}")


def _taken(host: str, port: int) -> str:
    """Why this port cannot be listened to; "" if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            # As a server does it: connections of an earlier one in TIME_WAIT are no obstacle.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""

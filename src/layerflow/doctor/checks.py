"""Checks of this machine: where the server would listen, its memory, the program itself, what models share."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerflow import findings
from layerflow.agent.observer import fetch_status
from layerflow.config.settings import PoolSettings, ServerSettings, check_private
from layerflow.endpoint import socket_directory
from layerflow.errors import ConfigError, LayerflowError
from layerflow.findings import Finding, arena_fits, ok, problem, size_text, warning
from layerflow.http_server import MAX_CONNECTIONS
from layerflow.system import machine, unix_sockets
from layerflow.system.descriptors import FLOOR, most_used
from layerflow.system.machine import existing
from layerflow.system.memfd import HUGE_PAGE_BYTES
from layerflow.system.unix_sockets import why_not_listening

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
    wanted = most_used(http=MAX_CONNECTIONS, workers=settings.max_sessions, clients=settings.max_clients)
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


# Whether the machine has the memory for the arena.


LARGE_BYTES = 32 << 30
"""From here on a GPU's page tables for an arena of small pages are worth a word: 2 MiB a GiB."""


def examine_memory(pool: PoolSettings, running: dict[str, Any] | None) -> Iterator[Finding]:
    """The arena against free memory, huge pages and the limit for pinned memory.

    :param running: status of the server with this endpoint, whose arena is taken from what is free already.
    """
    arena = (running or {}).get("arena") or {"bytes": 0, "taken_bytes": 0, "hugepages": False}
    if pool.hugepages:
        yield _huge_pages(pool.size, arena["bytes"] if arena["hugepages"] else 0)
    else:
        yield arena_fits(pool.size, 0 if arena["hugepages"] else arena["taken_bytes"])
    yield _node(pool.numa)
    yield _pinning(pool.size)
    if not pool.hugepages and pool.size >= LARGE_BYTES and machine.devices("nvidia[0-9]*"):
        yield _page_tables(pool.size)


def _page_tables(nbytes: int) -> Finding:
    tables = size_text(nbytes // 512)
    found = f"each GPU maps the arena's {size_text(nbytes)} in pages of 4 KiB: some {tables} of its memory each"
    return warning("pinned pages", found, "pool.hugepages = true: fewer pages, pinned in less time by each rank")


def _huge_pages(nbytes: int, held: int) -> Finding:
    pages, free = -(-nbytes // HUGE_PAGE_BYTES), machine.free_huge_bytes()
    found = f"{size_text(nbytes)} in huge pages; {size_text(free)} of them are free"
    if held:
        found += f", and {size_text(held)} the running server's"
    if pages * HUGE_PAGE_BYTES > free + held:
        advice = f"sysctl vm.nr_hugepages={pages} (more than are in use now), or pool.hugepages = false"
        return problem("huge pages", found, advice)
    return ok("huge pages", found)


def _node(setting: str) -> Finding:
    check = "memory node"
    try:
        return ok(check, f"arena on {machine.here(setting)}")
    except ConfigError as error:
        return problem(check, str(error), "pool.numa = auto")


def _pinning(nbytes: int) -> Finding:
    check, limit = "pinned memory", machine.lockable_bytes()
    if limit is None:
        return ok(check, "RLIMIT_MEMLOCK: no limit")
    found = f"RLIMIT_MEMLOCK is {size_text(limit)}, the arena {size_text(nbytes)}"
    if limit >= nbytes:
        return ok(check, found)
    if not (machine.devices("davinci[0-9]*") or machine.devices("nvidia[0-9]*") or machine.rdma_devices()):
        return ok(check, f"{found}; without an accelerator or RDMA nothing is pinned")
    return warning(check, found, "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity) for server and engines")


# The program itself: Python, its libraries, the C copy loop.


_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")


def examine_program() -> Iterator[Finding]:
    """Python, the kernel, libraries, torch, the C copy loop."""
    yield _python()
    yield _other_containers()
    yield _libraries()
    yield _torch()
    yield _copy_loop()


def _python() -> Finding:
    return ok("python", f"Python {platform.python_version()} on {platform.system()} {platform.release()}")


def _other_containers() -> Finding:
    check = "other containers"
    if unix_sockets.sees_other_namespaces():
        return ok(check, "the death of an engine is seen in any pid namespace")
    return warning(
        check,
        f"Linux {platform.release()} shows no process of another pid namespace: there a hang-up counts as a death",
        "matters where engines and server run in containers: give them one pid namespace, or use Linux 6.5",
    )


def _libraries() -> Finding:
    try:
        requirements = importlib.metadata.requires("layerflow") or []
    except importlib.metadata.PackageNotFoundError:
        return warning("libraries", "layerflow runs from a source tree; its libraries are not listed", "pip install .")
    found, missing, wanted = [], [], []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if "extra ==" in requirement or match is None:
            continue
        version = findings.installed(match[1])
        if version is not None and not (match[2] and findings.release(version) < findings.release(match[2])):
            found.append(f"{match[1]} {version}")
            continue
        wanted.append(f"'{requirement}'")
        if version is None:
            missing.append(f"{match[1]} is not installed")
        else:
            missing.append(f"{match[1]} {version} is older than {match[2]}")
    if missing:
        return problem("libraries", "; ".join(missing), f"pip install {' '.join(wanted)}")
    return ok("libraries", ", ".join(sorted(found)))


def _torch() -> Finding:
    version = findings.installed("torch")
    return ok("torch", version or "not installed; only engines, `layerflow demo` and most of `layerflow bench` need it")


def _copy_loop() -> Finding:
    if importlib.util.find_spec("layerflow.ops._copy") is None:
        return warning(
            "copy loop",
            "the C loop is not built; copies on cpu are slower",
            "install a C compiler and Python's headers, then, in layerflow's source tree, "
            "pip install --force-reinstall --no-deps .",
        )
    return ok("copy loop", "built")


# What the models of the running server share with engines of other tensor sizes.


def examine_sharing(running: dict[str, Any] | None) -> Iterator[Finding]:
    """A line for each model that engine workers of the running server have.

    :param running: its status; None = no server runs, and no model is known.
    """
    models: dict[str, dict[str, Any]] = {}
    for session in (running or {}).get("sessions", []):
        if session["memory"] and session["fingerprint"]:
            models[session["fingerprint"]] = session
    for session in models.values():
        check = f"model {session['model']}"
        if bound := session.get("bound_to_size"):
            size = session["tp"].rpartition("/")[2]
            yield warning(
                check,
                f"only engines of tensor size {size} hit what it stores: {'; '.join(bound)}",
                "where engines of other sizes are to share it, choose an attention backend with a head-major layout",
            )
        else:
            yield ok(check, "engines of all tensor sizes share what it stores")

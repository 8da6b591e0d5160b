"""What a check found, and the questions that checks ask: of memory, packages, child processes and ports."""

from __future__ import annotations

import enum
import http.client
import importlib.metadata
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from layerflow.system import machine


class Severity(enum.StrEnum):
    """How bad it is: a problem keeps the server or its backend from working, a warning does not."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    :param check: what was looked at, e.g. ``"mooncake master"``.
    :param found: what is there, or what is wrong.
    :param advice: what to do; "" if nothing.
    """

    check: str
    state: Severity
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Make a finding: it works, and not as well as it could or not as the user may think."""
    return Finding(check, Severity.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """Make a finding: it will not work."""
    return Finding(check, Severity.PROBLEM, found, advice)


# Whether the machine has the memory that a setting asks for.


_TIGHT = 0.9
"""A size past this share of the free memory is worth a warning."""


def size_text(nbytes: float) -> str:
    """For people: ``"1.5 GiB"``, ``"16 MiB"``, ``"4 TiB"``."""
    value, unit = next(
        (nbytes / (1 << power), name)
        for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"))
        if nbytes >= 1 << power or power == 20
    )
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def fits(check: str, nbytes: int, key: str, *, beside: int = 0, held: int | None = 0) -> Finding:
    """Say whether `nbytes` fit into this machine: into all of its memory, and into what of it is free.

    :param key: the setting that decides `nbytes`.
    :param beside: an arena that is taken too, bytes.
    :param held: what a running server has of both already, bytes, which is free for them; None = all of it.
    """
    wanted = nbytes + beside
    what = size_text(nbytes) + (f" beside an arena of {size_text(beside)}" if beside else "")
    total = machine.total_bytes()
    if total is not None and wanted > total:
        found = f"{what}; this machine, or the memory limit of this control group, has {size_text(total)} in all"
        return problem(check, found, f"set a smaller {key}")
    known = [
        (left, where)
        for left, where in (
            (machine.available_bytes(), "free on this machine"),
            (machine.cgroup_bytes(), "left below the memory limit of this control group"),
        )
        if left is not None
    ]
    if not known:
        return warning(check, f"{what}; this kernel does not say what is free", "compare it with the machine yourself")
    left, where = min(known)
    found = f"{what}; {size_text(left)} {where}"
    if held is None:
        return ok(check, f"{found} beside what the running server has")
    if held:
        found += f", and {size_text(held)} that the running server has"
    if wanted > left + held:
        return warning(check, found, f"set a smaller {key}, or free memory: engines may be killed when it fills up")
    if wanted > _TIGHT * (left + held):
        return warning(check, found, f"leave engines and the system more room: a smaller {key}")
    return ok(check, found)


def arena_fits(nbytes: int, held: int = 0) -> Finding:
    """Say whether an arena of ordinary pages fits, as the server asks at its start and the doctor for it.

    :param held: what the arena of a running server, in whose place it comes, has of it already, bytes.
    """
    return fits("arena", nbytes, "pool.size", held=held)


# Questions to the outside: is a package there, does a child process get through, does somebody answer.


CHILD_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 1.5
_PAGE_BYTES = 64 << 10


def has_module(name: str) -> bool:
    """Whether a top-level module could be imported; it is not."""
    return importlib.util.find_spec(name) is not None


def installed(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def distribution_of(module: str) -> tuple[str, str] | None:
    """Name and version of the distribution that brings a top-level module."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return (names[0], importlib.metadata.version(names[0])) if names else None


def release(version: str) -> tuple[int, ...]:
    """The three leading numbers: ``"0.3.13.post1"`` is ``(0, 3, 13)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def child(code: str, environment: Mapping[str, str] | None = None, timeout_s: float = CHILD_TIMEOUT_S) -> str:
    """Run Python code in a process of its own.

    Native libraries crash, hang and take signal handlers, so none is ever loaded here.

    :param environment: variables on top of this process's.
    :returns: "" if it got through, else why not, in one line.
    """
    variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | dict(environment or {})
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not finish in {timeout_s:g} s"
    if ended.returncode == 0:
        return ""
    if ended.returncode < 0:
        return f"died of {signal.Signals(-ended.returncode).name}"
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {ended.returncode}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port`` with or without a scheme, as the settings let it through."""
    url = urlsplit(address if "://" in address else f"tcp://{address}")
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 0)


def connects(address: str, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
    """Whether somebody listens at ``host:port``: "" if so, else why not."""
    try:
        socket.create_connection(host_and_port(address), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def http_get(url: str, timeout_s: float = ANSWER_TIMEOUT_S, most_bytes: int | None = _PAGE_BYTES) -> tuple[str, bytes]:
    """A page: "" and its body, or why not and what there is of one.

    :param most_bytes: so much of the body is read; None = all.
    """
    # Not urllib: it asks for `Connection: close`, and then memcache's MetaService sends no body.
    connection = http.client.HTTPConnection(*host_and_port(url), timeout=timeout_s)
    try:
        connection.request("GET", urlsplit(url).path or "/")
        answer = connection.getresponse()
        body = answer.read(most_bytes)
    except OSError as error:
        return error.strerror or str(error), b""
    except http.client.HTTPException as error:
        return f"no HTTP answer ({error!r})", b""
    finally:
        connection.close()
    return ("" if answer.status == 200 else f"answered {answer.status} {answer.reason}"), body

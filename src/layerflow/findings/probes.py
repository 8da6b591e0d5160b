"""Questions to the outside: is a package there, does a child process get through, does somebody answer."""

from __future__ import annotations

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
from urllib.parse import urlsplit

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
    """Of ``host:port`` with or without a scheme, as the settings let it through."""
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

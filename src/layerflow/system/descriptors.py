"""File descriptors: how many this process may have, and whether enough are left.

The kernel gives out the lowest number that is free. So a new descriptor whose number is near the limit says that few
are left, whoever in the process has taken the others.
"""

from __future__ import annotations

import contextlib
import os
import resource

from layerflow.errors import ConfigError

FLOOR = 192
"""A process with clients does not start with fewer: its libraries, logs and memory take about 60, its reserve 48."""

FOR_HTTP, FOR_CLIENTS, FOR_WORKERS = 112, 80, 48
"""So many descriptors are to be left after a connection has come. Those of HTTP are refused first, then those of
clients and peers, then those of engine workers; the rest is for the process's own files."""


def most_used(*, http: int, workers: int, clients: int) -> int:
    """Return how many descriptors a server may take: its own, and those of so many connections of each kind.

    An engine worker has a connection, its memory's and its process's descriptor; a client has two.
    """
    return FLOOR + http + 3 * workers + 2 * clients


def prepare_descriptors() -> int:
    """Raise this process's limit as far as its user may, and return it.

    :raises ConfigError: it is too low to serve anybody.
    """
    raise_limit()
    if limit() < FLOOR:
        raise ConfigError(
            f"this process may open {limit()} files, and {FLOOR} are the least to serve anybody with: raise `ulimit -n`"
            " (LimitNOFILE= of a systemd unit)"
        )
    return limit()


def raise_limit() -> None:
    """Raise this process's limit as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some containers name a hard limit above what they give.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def leaves(descriptor: int, reserve: int) -> bool:
    """Are at least `reserve` descriptors left besides this newest one?"""
    return descriptor < limit() - reserve


def has_room(count: int, reserve: int) -> bool:
    """Can `count` more be opened so that `reserve` are left?"""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return leaves(max(opened), reserve)

"""Checks a configuration against this machine without starting the server: what would go wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from layerflow.backends import installed, named
from layerflow.config.pool import MEMORY
from layerflow.config.settings import PoolSettings, Settings
from layerflow.doctor.checks import examine_listening, examine_memory, examine_program, examine_sharing, running_server
from layerflow.doctor.peers import examine_peers
from layerflow.findings import Finding, Severity, ok, problem

__all__ = ["Finding", "Severity", "examine"]


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check that the configuration asks for, the program's own first.

    Takes some seconds where something does not answer. Loads no native library, and changes nothing, but for the user's
    cache where an emulated CANN is still to be built.
    """
    running = running_server(settings.server)
    yield from examine_program()
    yield from examine_listening(settings.server, running)
    yield from examine_memory(settings.pool, running)
    yield from examine_sharing(running)
    yield from examine_peers(settings, running)
    if settings.pool.behind != MEMORY:
        yield from examine_backend(settings.pool, running is not None)


def examine_backend(pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """What the backend behind the arena needs, as its plugin examines it.

    :param running: a server with this endpoint runs.
    """
    name, examine = pool.behind, installed()[pool.behind].examine
    if why := pool.unreachable():
        yield problem(f"{name} address", *why)
    if not examine:
        yield ok(name, "its package examines nothing")
        return
    yield from named(examine)(pool.section(name), pool, running)

"""Checks a configuration against this machine without starting the server: what would go wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from layerflow.config.settings import Settings
from layerflow.doctor.disk import examine_disk
from layerflow.doctor.finding import Finding, Severity
from layerflow.doctor.listening import examine_listening, running_server
from layerflow.doctor.memcache import examine_memcache
from layerflow.doctor.memory import examine_memory
from layerflow.doctor.mooncake import examine_mooncake
from layerflow.doctor.program import examine_program

__all__ = ["Finding", "Severity", "examine"]


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check that the configuration asks for, the program's own first.

    Takes some seconds where something does not answer. Loads no native library, and changes nothing, but for the user's
    cache where an emulated CANN is still to be built.
    """
    running = running_server(settings.server)
    yield from examine_program()
    yield from examine_listening(settings.server, running)
    yield from examine_memory(settings.pool, running is not None)
    if settings.pool.disk.path:
        yield from examine_disk(settings.pool.disk)
    if settings.pool.backend == "mooncake":
        yield from examine_mooncake(settings, running is not None)
    if settings.pool.backend == "memcache":
        yield from examine_memcache(settings, running is not None)

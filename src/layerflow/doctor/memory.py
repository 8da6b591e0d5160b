"""Whether the machine has the memory for the arena."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerflow.config.settings import PoolSettings
from layerflow.errors import ConfigError
from layerflow.findings import Finding, ok, problem, warning
from layerflow.findings.memory import arena_fits, size_text
from layerflow.system import machine, numa
from layerflow.system.memfd import HUGE_PAGE_BYTES

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
        return ok(check, f"arena on {numa.here(setting)}")
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

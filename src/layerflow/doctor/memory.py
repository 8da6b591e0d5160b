"""Whether the machine has the memory: for the arena, and for what a backend gives to its pool."""

from __future__ import annotations

from collections.abc import Iterator

from layerflow import machine
from layerflow.config.settings import PoolSettings
from layerflow.doctor.finding import Finding, ok, problem, warning
from layerflow.memfd import HUGE_PAGE_BYTES

_TIGHT = 0.9


def gib(nbytes: float) -> str:
    """For people: ``"1.5 GiB"``, ``"16 MiB"``."""
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.3g} MiB"


def examine_memory(pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """The arena against free memory, huge pages and the limit for pinned memory.

    :param running: a server with this endpoint runs, so that its arena is taken from what is free already.
    """
    if pool.hugepages:
        yield _huge_pages(pool.size, running)
    else:
        yield fits("arena", pool.size, 0, "pool.size", running)
    yield _pinning(pool.size)


def fits(check: str, nbytes: int, arena: int, key: str, running: bool) -> Finding:
    """`nbytes`, beside an arena that is taken too, against free memory and the tightest limit.

    :param key: the setting that decides `nbytes`.
    """
    wanted = nbytes + arena
    what = gib(nbytes) + (f" beside an arena of {gib(arena)}" if arena else "")
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
    found = f"{what}; {gib(left)} {where}"
    if wanted > left and not running:
        return problem(check, found, f"set a smaller {key}, or give it more memory")
    if wanted > _TIGHT * left and not running:
        return warning(check, found, f"leave engines and the system more room: a smaller {key}")
    return ok(check, found)


def _huge_pages(nbytes: int, running: bool) -> Finding:
    pages, free = -(-nbytes // HUGE_PAGE_BYTES), machine.free_huge_bytes()
    found = f"{gib(nbytes)} in huge pages; {gib(free)} of them are free"
    if pages * HUGE_PAGE_BYTES > free and not running:
        advice = f"sysctl vm.nr_hugepages={pages} (more than are in use now), or pool.hugepages = false"
        return problem("huge pages", found, advice)
    return ok("huge pages", found)


def _pinning(nbytes: int) -> Finding:
    check, limit = "pinned memory", machine.lockable_bytes()
    if limit is None:
        return ok(check, "RLIMIT_MEMLOCK: no limit")
    found = f"RLIMIT_MEMLOCK is {gib(limit)}, the arena {gib(nbytes)}"
    if limit >= nbytes:
        return ok(check, found)
    if not (machine.devices("davinci[0-9]*") or machine.devices("nvidia[0-9]*") or machine.rdma_devices()):
        return ok(check, f"{found}; without an accelerator or RDMA nothing is pinned")
    return warning(check, found, "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity) for server and engines")

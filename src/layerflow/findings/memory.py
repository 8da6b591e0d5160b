"""Whether the machine has the memory that a setting asks for."""

from __future__ import annotations

from layerflow.findings import Finding, ok, problem, warning
from layerflow.system import machine

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

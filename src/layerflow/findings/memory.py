"""Whether the machine has the memory that a setting asks for."""

from __future__ import annotations

from layerflow.findings import Finding, ok, problem, warning
from layerflow.system import machine

_TIGHT = 0.9


def gib(nbytes: float) -> str:
    """For people: ``"1.5 GiB"``, ``"16 MiB"``."""
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.3g} MiB"


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

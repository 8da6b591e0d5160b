"""The pool's settings: the arena, and the pools that may be behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, field_validator, model_validator

from layerflow.backends import broken, canonical, installed
from layerflow.config.fields import BackendOptions, Real, Section, Size, Whole, setting
from layerflow.system import machine

MEMORY = "memory"
"""The backend that is none: the arena is all there is, unless a section chooses its backend by itself."""
LEAST_POOL_BYTES = 64 << 10
_DAY_MS = 86_400_000


def default_pool_bytes() -> int:
    """A quarter of the memory that this process may have, in whole GiB (below four GiB: in whole 64 MiB)."""
    quarter = (machine.total_bytes() or 4 << 30) // 4
    step = 1 << 30 if quarter >= 1 << 30 else 64 << 20
    return max(step, quarter // step * step)


class _OwnPoolSettings(Section):
    """The pool of objects: the arena that holds them, and what is behind it."""

    backend: str = setting(
        MEMORY, f"What is behind the arena: memory (nothing, or [pool.disk]), or one of {', '.join(installed())}."
    )
    size: Size = setting(
        default_pool_bytes,
        "Bytes of the arena.",
        unit="bytes",
        ge=LEAST_POOL_BYTES,
        default_text="a quarter of this machine's memory, or of its control group's limit",
    )
    warm: bool = setting(True, "Touch the arena's pages in the background at start, so that no transfer pays for them.")
    hugepages: bool = setting(False, "Back the arena with huge pages; they must be reserved on the machine.")
    numa: str = setting(
        machine.NUMA_AUTO,
        "Memory node of the arena: auto (near the accelerators; in turn where they are on several), off, or a number.",
    )
    lease_ms: Whole = setting(
        10_000, "A lookup's hits stay pinned so long without being used.", unit="ms", ge=1, le=_DAY_MS
    )
    lease_share: Real = setting(
        0.5,
        "Hits that wait for their step are pinned only while all that is pinned is within this share of the arena, so "
        "that saves find room however many requests wait. Leases of remote keys end where this machine's engines find "
        "no room for theirs, or another key less than an equal part.",
        unit="of the arena",
        ge=0.01,
        le=1,
    )
    link_gbps: Real = setting(
        0.0,
        "Emulate a link of so many gigabytes (10^9 bytes) per second between engines and arena; 0 = off.",
        unit="GB/s",
        ge=0,
        le=10_000,
    )
    link_latency_us: Whole = setting(0, "Latency of the emulated link, per batch.", unit="us", ge=0, le=1_000_000)
    write_backlog: Size = setting(
        1 << 30,
        "Objects of the arena waiting to be written to the backend or disk; past it new ones are not, and counted.",
        unit="bytes",
    )
    lookup_timeout_ms: Whole = setting(
        100,
        "How long a lookup waits for the backend or disk; what it did not hear of is a miss.",
        unit="ms",
        ge=1,
        le=_DAY_MS,
    )
    fetch_timeout_ms: Whole = setting(
        10_000,
        "A fetch of which nothing has come for so long is given up; whole objects are used.",
        unit="ms",
        ge=1,
        le=_DAY_MS,
    )
    host_timeout_ms: Whole = setting(
        5000,
        "What a native call of a backend may take; a host process whose call hangs for several times as long is "
        "killed and restarted.",
        unit="ms",
        ge=10,
        le=_DAY_MS,
    )

    @field_validator("backend")
    @classmethod
    def _known(cls, value: str) -> str:
        return usable_backend(value)

    @field_validator("numa", mode="before")
    @classmethod
    def _node(cls, value: object) -> str:
        named = str(value).strip().lower()
        if named not in (machine.NUMA_AUTO, machine.NUMA_OFF) and not (named.isdecimal() and int(named) < 1024):
            raise ValueError(f"{value!r}: must be auto, off, or the number of a node")
        return named

    @model_validator(mode="after")
    def _one_tier(self) -> PoolSettings:
        for name, plugin in installed().items():
            key = plugin.chosen_by
            if not key:
                continue
            value = getattr(self.section(name), key)
            if value and self.backend not in (MEMORY, name):
                raise ValueError(
                    f'{name}.{key} = {value!r} needs backend = "{MEMORY}": {self.backend} keeps objects itself; '
                    "remove one of them"
                )
            if not value and self.backend == name:
                raise ValueError(f"backend = {name!r} needs pool.{name}.{key}")
        return self

    @property
    def behind(self) -> str:
        """Name of the backend behind the arena; ``memory`` = there is none."""
        if self.backend != MEMORY:
            return self.backend
        by_key = ((name, plugin.chosen_by) for name, plugin in installed().items() if plugin.chosen_by)
        return next((name for name, key in by_key if getattr(self.section(name), key)), MEMORY)

    def section(self, name: str) -> BackendOptions:
        """The section of an installed backend."""
        found: BackendOptions = getattr(self, name)
        return found

    def for_host(self) -> dict[str, Any]:
        """What the backend behind the arena is made from in its host process."""
        return self.section(self.behind).for_host() | {"timeout_ms": self.host_timeout_ms}

    def unreachable(self) -> tuple[str, str] | None:
        """Why the other machines of a shared pool could not reach this one, and what to do; None = they can."""
        return None if self.behind == MEMORY else self.section(self.behind).unreachable()


def backends() -> tuple[str, ...]:
    """What ``pool.backend`` may be."""
    return (MEMORY, *installed())


def usable_backend(name: str) -> str:
    """The backend's own name, for what a user wrote.

    :raises ValueError: there is no such backend, or it cannot be used; the message says why.
    """
    own = canonical(name.strip().lower())
    if own in broken():
        raise ValueError(f"backend {own} cannot be used: {broken()[own]}; mend its package")
    if own not in backends():
        raise ValueError(f"no such backend; there are {', '.join(backends())}")
    return own


if TYPE_CHECKING:
    PoolSettings = _OwnPoolSettings
else:
    # The sections of all installed backends, ours too: each is described where the backend is.
    _sections = {name: plugin.options for name, plugin in installed().items()}
    _fields = {name: (options, Field(default_factory=options)) for name, options in _sections.items()}
    PoolSettings = create_model("PoolSettings", __base__=_OwnPoolSettings, **_fields)
    PoolSettings.__doc__ = _OwnPoolSettings.__doc__

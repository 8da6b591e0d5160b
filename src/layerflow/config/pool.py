"""The pool's settings: the arena, and the pools that may be behind it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, field_validator, model_validator

from layerflow import machine
from layerflow.backends import installed
from layerflow.config.fields import Real, Section, Size, Whole, format_size, setting

OWN_BACKENDS = ("memory", "mooncake", "memcache")
BACKEND_ALIASES = {"memcache_hybrid": "memcache"}
# Mooncake's own limit: a smaller segment is refused by its setup.
MIN_SEGMENT_BYTES = 16 << 20
_DAY_MS = 86_400_000
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})")


def _address(value: str, scheme: str = "") -> str:
    """`value` if it is ``host:port`` after `scheme`."""
    match = _ADDRESS.fullmatch(value.removeprefix(scheme))
    if not value.startswith(scheme) or match is None or not 0 < int(match[2]) <= 65535:
        raise ValueError(f'should be "{scheme}host:port"')
    return value


def _http(value: str) -> str:
    if not value:
        return value
    try:
        return _address(value.rstrip("/"), "http://")
    except ValueError:
        raise ValueError('should be "http://host:port", or "" for none') from None


def default_pool_bytes() -> int:
    """A quarter of the memory that this process may have, in whole GiB (below four GiB: in whole 64 MiB)."""
    quarter = (machine.total_bytes() or 4 << 30) // 4
    step = 1 << 30 if quarter >= 1 << 30 else 64 << 20
    return max(step, quarter // step * step)


class DiskSettings(Section):
    """A persistent tier under the arena; only with ``backend = "memory"``."""

    path: str = setting("", 'Directory of the tier, of this server alone; "" = off.')
    capacity: Size = setting(64 << 30, "Most bytes of objects kept there.", unit="bytes", ge=1 << 20)


class MooncakeSettings(Section):
    """A Mooncake store, used with ``backend = "mooncake"``."""

    master: str = setting("127.0.0.1:50051", "The master's RPC address, host:port.")
    metrics: str = setting(
        "http://127.0.0.1:9003", 'The master\'s HTTP, asked for its health; "" = only connect to `master`.'
    )
    metadata_server: str = setting("P2PHANDSHAKE", "P2PHANDSHAKE, or the URL of a metadata server.")
    hostname: str = setting("127.0.0.1", "This machine's name or address, as other clients of the store reach it.")
    port: Whole = setting(0, "Port of this client; 0 = a free one.", ge=0, le=65535)
    protocol: str = setting("tcp", "Transport between clients: tcp, rdma, or another that the package was built with.")
    devices: str = setting("", 'RDMA devices, separated by commas; "" = all that Mooncake finds.')
    segment_size: Size = setting(
        1 << 30, "Memory that this machine gives to the store; 0 = none, else at least 16MiB.", unit="bytes"
    )
    replicas: Whole = setting(1, "Copies of each object, on different segments.", unit="copies", ge=1, le=64)
    preferred_segment: str = setting("", 'Segment that objects go to where it has room; "" = the store decides.')
    soft_pin: bool = setting(False, "Pin objects softly: the store evicts others first.")
    warm: bool = setting(True, "Touch the segment's pages at start.")

    _master = field_validator("master")(_address)
    _metrics = field_validator("metrics")(_http)

    @field_validator("metadata_server", "hostname", "protocol")
    @classmethod
    def _given(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("should not be empty")
        return value.strip()

    @field_validator("segment_size")
    @classmethod
    def _segment(cls, value: int) -> int:
        if 0 < value < MIN_SEGMENT_BYTES:
            raise ValueError(f"should be 0 or at least {format_size(MIN_SEGMENT_BYTES)}, a limit of Mooncake")
        return value


class MemcacheSettings(Section):
    """memcache_hybrid, used with ``backend = "memcache"``."""

    config_file: str = setting("", 'An mmc-local.conf of the package; it replaces the keys below. "" = none.')
    meta_service_url: str = setting("tcp://127.0.0.1:5000", "The MetaService.")
    config_store_url: str = setting("tcp://127.0.0.1:6000", "The configuration store of the MetaService.")
    metrics_url: str = setting(
        "http://127.0.0.1:8000",
        'HTTP of the MetaService, asked for its health; "" = only connect to `meta_service_url`.',
    )
    hcom_url: str = setting("tcp://127.0.0.1:7000", "Where this client listens for others; a port of its own.")
    protocol: str = setting(
        "host_rdma",
        "Transport: host_rdma, host_urma, host_tcp, host_shm, device_rdma, device_urma, device_uboe or device_sdma.",
    )
    dram_size: Size = setting(1 << 30, "Memory that this machine gives to the pool; 0 = none.", unit="bytes")
    max_dram_size: Size = setting(64 << 30, "Largest dram_size of any client of this pool.", unit="bytes")
    world_size: Whole = setting(
        256,
        "Most clients of the pool, each server and each worker with `direct` being one; the same at all of them.",
        unit="clients",
        ge=1,
        le=65_536,
    )
    device_id: Whole = setting(0, "Number of the NPU.", ge=0, le=1023)
    cann_emulator: str = setting("", 'Directory of an emulated CANN, for tests and demos; "" = the real one.')
    direct: bool = setting(
        False, "Engine workers on an NPU move bytes straight between device memory and the pool, past the arena."
    )

    _metrics = field_validator("metrics_url")(_http)

    @field_validator("meta_service_url", "config_store_url", "hcom_url")
    @classmethod
    def _tcp(cls, value: str) -> str:
        return _address(value, "tcp://")

    @model_validator(mode="after")
    def _sizes(self) -> MemcacheSettings:
        if self.dram_size > self.max_dram_size:
            raise ValueError(
                f"dram_size = {format_size(self.dram_size)} should be at most "
                f"max_dram_size = {format_size(self.max_dram_size)}"
            )
        if self.direct and self.config_file:
            raise ValueError(
                "direct = true needs the keys of this section: each worker is a client with an address of its own; "
                "remove config_file"
            )
        if self.direct and not self.metrics_url:
            raise ValueError(
                "direct = true needs metrics_url: a MetaService that ended is known at once by that connection only"
            )
        return self


def is_loopback(address: str) -> bool:
    """Whether ``host:port``, with or without a scheme, is a machine's own loopback, which no other machine reaches."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class _OwnPoolSettings(Section):
    """The pool of objects: the arena that holds them, and what is behind it."""

    backend: str = setting(
        "memory", "What is behind the arena: memory (nothing, or [pool.disk]), mooncake or memcache."
    )
    size: Size = setting(
        default_pool_bytes,
        "Bytes of the arena.",
        unit="bytes",
        ge=64 << 10,
        default_text="a quarter of this machine's memory, or of its control group's limit",
    )
    warm: bool = setting(True, "Touch the arena's pages in the background at start, so that no transfer pays for them.")
    hugepages: bool = setting(False, "Back the arena with huge pages; they must be reserved on the machine.")
    lease_ms: Whole = setting(
        10_000, "A lookup's hits stay pinned so long without being used.", unit="ms", ge=1, le=_DAY_MS
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
        "What a native call of a backend may take; a host process whose call hangs for longer is killed and restarted.",
        unit="ms",
        ge=10,
        le=_DAY_MS,
    )
    disk: DiskSettings = Field(default_factory=DiskSettings)
    mooncake: MooncakeSettings = Field(default_factory=MooncakeSettings)
    memcache: MemcacheSettings = Field(default_factory=MemcacheSettings)

    @field_validator("backend")
    @classmethod
    def _known(cls, value: str) -> str:
        name = value.strip().lower()
        name = BACKEND_ALIASES.get(name, name)
        if name not in backends():
            raise ValueError(f"no such backend; there are {', '.join(backends())}")
        return name

    def unreachable(self) -> tuple[str, str] | None:
        """Why the other machines of a shared pool could not reach this one, and what to do; None = they can."""
        mooncake, memcache = self.mooncake, self.memcache
        if self.backend == "mooncake":
            key, own, theirs, service = "hostname", f"{mooncake.hostname}:0", mooncake.master, "the master"
        elif self.backend == "memcache" and not memcache.config_file and memcache.protocol != "host_shm":
            key, own, theirs, service = "hcom_url", memcache.hcom_url, memcache.meta_service_url, "the MetaService"
        else:
            return None
        if not is_loopback(own) or is_loopback(theirs):
            return None
        return (
            f"pool.{self.backend}.{key} = {own.removesuffix(':0')!r} is this machine's loopback, and {service} is "
            f"elsewhere ({theirs}): the other machines of the pool cannot reach this one",
            f"set pool.{self.backend}.{key} to an address of this machine that the others reach",
        )

    @model_validator(mode="after")
    def _one_tier(self) -> PoolSettings:
        if self.disk.path and self.backend != "memory":
            raise ValueError(
                f'disk.path = {self.disk.path!r} needs backend = "memory": {self.backend} keeps objects itself; '
                "remove one of them"
            )
        return self


def backends() -> tuple[str, ...]:
    """What ``pool.backend`` may be: ours, and those of installed packages."""
    return (*OWN_BACKENDS, *_sections())


def _sections() -> dict[str, Any]:
    """A field for the section of each installed backend that brings its own."""
    found = {name: plugin.options for name, plugin in installed().items() if plugin.options is not None}
    return {name: (options, Field(default_factory=options)) for name, options in found.items()}


if TYPE_CHECKING:
    PoolSettings = _OwnPoolSettings
else:
    PoolSettings = create_model("PoolSettings", __base__=_OwnPoolSettings, **_sections())
    PoolSettings.__doc__ = _OwnPoolSettings.__doc__

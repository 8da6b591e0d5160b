"""The entry point of this backend, and its section of the configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from layerflow import findings
from layerflow.backends import LEAST_TRIAL_BYTES, Plugin, Trial, free_ports
from layerflow.config.fields import (
    BackendOptions,
    PathText,
    Size,
    Whole,
    address,
    format_size,
    http_address,
    is_loopback,
    setting,
)
from layerflow.errors import Unsupported

EMULATED = ("host_tcp", "host_shm")
"""Transports of the emulated CANN."""
META_KEY = "ock.mmc.meta_service_url"
"""Of the package's own configuration file."""
_REQUESTS = r"(?m)^memcache_batch_\w+_requests_total (\d+)"
_META_SERVICE = """
import sys
import memcache_hybrid
config = memcache_hybrid.MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url, config.log_path = sys.argv[1:]
config.log_level, config.log_output_target = "error", "file"
sys.exit(memcache_hybrid.MetaService.setup(config) or memcache_hybrid.MetaService.main())
"""


class MemcacheSettings(BackendOptions):
    """memcache_hybrid, used with ``backend = "memcache"``."""

    config_file: PathText = setting("", 'An mmc-local.conf of the package; it replaces the keys below. "" = none.')
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
    cann_emulator: PathText = setting("", 'Directory of an emulated CANN, for tests and demos; "" = the real one.')
    direct: bool = setting(
        False, "Engine workers on an NPU move bytes straight between device memory and the pool, past the arena."
    )

    _metrics = field_validator("metrics_url")(http_address)

    @field_validator("meta_service_url", "config_store_url", "hcom_url")
    @classmethod
    def _tcp(cls, value: str) -> str:
        return address(value, "tcp://")

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

    def file_keys(self) -> dict[str, str]:
        """Keys and values of `config_file`.

        :raises OSError: it cannot be read.
        :raises UnicodeDecodeError: it is no text.
        """
        lines = Path(self.config_file).read_text().splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
        return {key.strip(): value.strip() for key, _, value in pairs}

    def unreachable(self) -> tuple[str, str] | None:
        """See :meth:`BackendOptions.unreachable`."""
        if self.config_file or self.protocol == "host_shm":
            return None
        if not is_loopback(self.hcom_url) or is_loopback(self.meta_service_url):
            return None
        return (
            f"pool.memcache.hcom_url = {self.hcom_url!r} is this machine's loopback, and the MetaService is elsewhere "
            f"({self.meta_service_url}): the other machines of the pool cannot reach this one",
            "set pool.memcache.hcom_url to an address of this machine that the others reach",
        )

    def for_host(self) -> dict[str, Any]:
        """See :meth:`BackendOptions.for_host`; `direct` is for engine workers."""
        return self.model_dump(mode="json", exclude={"direct"})

    def for_workers(self) -> dict[str, Any] | None:
        """See :meth:`BackendOptions.for_workers`."""
        return self.for_host() if self.direct else None


def trial(options: MemcacheSettings, folder: Path, nbytes: int, running: bool) -> Trial:
    """See :class:`layerflow.backends.Plugin`.

    :raises Unsupported: the package is not installed.
    """
    if not findings.has_module("memcache_hybrid"):
        raise Unsupported("memcache's packages are not installed: pip install memcache_hybrid memfabric_hybrid")
    hcom, other_hcom, meta, store, http_port = free_ports(5)
    emulated = bool(options.cann_emulator)
    remark = "CANN emulated" if emulated else ""
    # Of all memory in the pool the host's is there first: a client may not reach at once what others bring later.
    other = {"hcom_url": f"tcp://127.0.0.1:{other_hcom}", "dram_size": 0}
    given: dict[str, Any] = {"protocol": "host_shm"} if emulated else {}
    if running:
        page = f"{options.metrics_url}/metrics"
        return Trial(options=given, other=other, page=page, requests=_REQUESTS, remark=remark)
    url = f"http://127.0.0.1:{http_port}"
    urls = {
        "meta_service_url": f"tcp://127.0.0.1:{meta}",
        "config_store_url": f"tcp://127.0.0.1:{store}",
        "metrics_url": url,
    }
    room = max(2 * nbytes, LEAST_TRIAL_BYTES)
    given |= urls | {
        "hcom_url": f"tcp://127.0.0.1:{hcom}", "world_size": 8, "dram_size": room, "max_dram_size": room
    }  # fmt: skip
    return Trial(
        options=given,
        other=other,
        command=(sys.executable, "-c", _META_SERVICE, *urls.values(), str(folder)),
        ready=f"{url}/health",
        page=f"{url}/metrics",
        requests=_REQUESTS,
        remark=remark,
    )


PLUGIN = Plugin(
    backend="layerflow.hosts.memcache.backend:Memcache",
    options=MemcacheSettings,
    aliases=("memcache_hybrid",),
    environment="layerflow.hosts.memcache.environment:environment",
    examine="layerflow.hosts.memcache.examine:examine",
    trial="layerflow.hosts.memcache.plugin:trial",
)

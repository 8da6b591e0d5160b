"""The entry point of this backend, and its section of the configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import field_validator

from layerflow.backends import LEAST_TRIAL_BYTES, Plugin, Trial, free_ports
from layerflow.config.fields import (
    BackendOptions,
    Size,
    Whole,
    address,
    format_size,
    http_address,
    is_loopback,
    setting,
)
from layerflow.errors import Unsupported

MIN_SEGMENT_BYTES = 16 << 20
"""Mooncake's own limit: a smaller segment is refused by its setup."""

# But for the requests of clients that are only alive.
_REQUESTS = r"(?m)^master_(?!ping_|fetch_tasks_)\w+_requests_total (\d+)"


class MooncakeSettings(BackendOptions):
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

    _master = field_validator("master")(address)
    _metrics = field_validator("metrics")(http_address)

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

    def unreachable(self) -> tuple[str, str] | None:
        """See :meth:`BackendOptions.unreachable`."""
        if not is_loopback(f"{self.hostname}:0") or is_loopback(self.master):
            return None
        return (
            f"pool.mooncake.hostname = {self.hostname!r} is this machine's loopback, and the master is elsewhere "
            f"({self.master}): the other machines of the pool cannot reach this one",
            "set pool.mooncake.hostname to an address of this machine that the others reach",
        )


def trial(options: MooncakeSettings, folder: Path, nbytes: int, running: bool) -> Trial:
    """See :class:`layerflow.backends.Plugin`.

    :raises Unsupported: the package is not installed.
    """
    if running:
        return Trial(other={"port": 0}, page=f"{options.metrics}/metrics", requests=_REQUESTS)
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        raise Unsupported("Mooncake's package is not installed: pip install mooncake-transfer-engine-non-cuda")
    rpc, metrics, one, two = free_ports(4)
    url = f"http://127.0.0.1:{metrics}"
    # Each client writes to its own segment: what moves does not depend on where the master puts it.
    return Trial(
        options={
            "master": f"127.0.0.1:{rpc}",
            "metrics": url,
            "hostname": "127.0.0.1",
            "port": one,
            "preferred_segment": f"127.0.0.1:{one}",
            "segment_size": max(2 * nbytes, LEAST_TRIAL_BYTES),
        },
        other={"port": two, "preferred_segment": f"127.0.0.1:{two}"},
        command=(
            str(program), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}", "--logtostderr",
        ),
        ready=f"{url}/health",
        page=f"{url}/metrics",
        requests=_REQUESTS,
    )  # fmt: skip


PLUGIN = Plugin(
    backend="layerflow.hosts.mooncake.backend:Mooncake",
    options=MooncakeSettings,
    examine="layerflow.hosts.mooncake.examine:examine",
    trial="layerflow.hosts.mooncake.plugin:trial",
)

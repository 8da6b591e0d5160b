"""A real ``mooncake_master`` on free ports of 127.0.0.1."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from service_process import ServiceProcess

from layerflow.backends import free_ports


class MooncakeMaster(ServiceProcess):
    """Options are flags of ``mooncake_master``, as ``default_kv_lease_ttl=3000``."""

    def __init__(self, **options: object) -> None:
        self.rpc_port, http_port = free_ports(2)
        command = [
            str(Path(sys.executable).with_name("mooncake_master")),
            *("--rpc_address=127.0.0.1", f"--rpc_port={self.rpc_port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={http_port}", "--logtostderr"),
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        super().__init__("mooncake_master", command, http_port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def check(self) -> None:
        """Its RPC may come up after its HTTP."""
        super().check()
        socket.create_connection(("127.0.0.1", self.rpc_port), timeout=2).close()

    def requests(self) -> dict[str, int]:
        """How many requests of each kind it has served: its counters, but for those of clients that are only alive."""
        found = self.figures(r"^master_(\w+)_requests_total (\d+)")
        return {name: count for name, count in found.items() if name not in ("ping", "fetch_tasks")}

    def allocated(self) -> dict[str, int]:
        """Bytes in use of each segment that has any."""
        return self.figures(r'^segment_allocated_bytes{segment="(.*)"} ([1-9]\d*)')

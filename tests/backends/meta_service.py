"""A real MetaService of memcache_hybrid on free ports of 127.0.0.1. Only one can run on a machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from service_process import ServiceProcess

from layerflow.backends import free_ports

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "npu" / "emulator"
MB = 1 << 20


class MetaService(ServiceProcess):
    """Started as the example starts it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="layerflow-meta-")
        self.port, self.store_port, http_port = free_ports(3)
        command = [
            *(sys.executable, str(ROOT / "examples" / "memcache" / "meta.py")),
            *("--port", str(self.port), "--store-port", str(self.store_port), "--http-port", str(http_port)),
            *("--logs", self._folder.name),
        ]
        super().__init__("the MetaService", command, http_port)

    def options(self, **more: Any) -> dict[str, Any]:
        """Of ``[pool.memcache]``, for a client under the emulator."""
        [hcom] = free_ports(1)
        return {
            "meta_service_url": f"tcp://127.0.0.1:{self.port}",
            "config_store_url": f"tcp://127.0.0.1:{self.store_port}",
            "metrics_url": self.url,
            "hcom_url": f"tcp://127.0.0.1:{hcom}",
            "protocol": "host_shm",
            "dram_size": 0,
            "max_dram_size": 1024 * MB,
            "world_size": 16,
            "cann_emulator": str(EMULATOR),
            "timeout_ms": 2500,
        } | more

    def requests(self) -> dict[str, int]:
        """How many requests of each kind it has served, as it counts them: per message, not per key in a message."""
        return self.figures(r"^memcache_(batch_\w+)_requests_total (\d+)")

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

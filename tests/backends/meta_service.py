"""A real MetaService of memcache_hybrid on free ports of 127.0.0.1. Only one can run on a machine."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mooncake_master import free_ports

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "npu" / "emulator"
READY_S = 30.0
MB = 1 << 20


class MetaService:
    """Runs until :meth:`close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="layerflow-meta-")
        self.port, self.store_port, self.http_port = free_ports(3)
        self._command = [
            *(sys.executable, str(ROOT / "examples" / "memcache" / "meta.py")),
            *("--port", str(self.port), "--store-port", str(self.store_port), "--http-port", str(self.http_port)),
            *("--logs", self._folder.name),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.start()

    def options(self, **more: Any) -> dict[str, Any]:
        """Of ``[pool.memcache]``, for a client under the emulator."""
        [hcom] = free_ports(1)
        return {
            "meta_service_url": f"tcp://127.0.0.1:{self.port}",
            "config_store_url": f"tcp://127.0.0.1:{self.store_port}",
            "metrics_url": f"http://127.0.0.1:{self.http_port}",
            "hcom_url": f"tcp://127.0.0.1:{hcom}",
            "protocol": "host_shm",
            "dram_size": 0,
            "max_dram_size": 1024 * MB,
            "world_size": 16,
            "cann_emulator": str(EMULATOR),
            "timeout_ms": 2500,
        } | more

    def start(self) -> None:
        """Also again, after :meth:`kill`; returns when it answers."""
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        until = time.monotonic() + READY_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                self._log.seek(0)
                raise RuntimeError(f"the MetaService did not start:\n{self._log.read().decode()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As an out-of-memory kill does."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def requests(self) -> dict[str, int]:
        """How many requests of each kind it has served, as it counts them: per message, not per key in a message."""
        found = re.findall(r"^memcache_(batch_\w+)_requests_total (\d+)", self._get("/metrics").decode(), re.MULTILINE)
        return {name: int(count) for name, count in found}

    def close(self) -> None:
        self.kill()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> MetaService:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _get(self, path: str) -> bytes:
        asked = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=2)
        try:
            asked.request("GET", path)
            answer = asked.getresponse()
            body = answer.read()
            if answer.status != http.HTTPStatus.OK:
                raise ConnectionError(f"{path}: {answer.status}")
            return body
        finally:
            asked.close()

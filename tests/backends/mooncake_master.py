"""A real ``mooncake_master`` on free ports of 127.0.0.1."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READY_S = 30.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class MooncakeMaster:
    """Runs until :meth:`close`. Options are flags of ``mooncake_master``, as ``default_kv_lease_ttl=3000``."""

    def __init__(self, **options: object) -> None:
        self.rpc_port, self.http_port = free_ports(2)
        self._command = [
            str(Path(sys.prefix) / "bin" / "mooncake_master"),
            f"--rpc_address=127.0.0.1 --rpc_port={self.rpc_port}",
            f"--metrics_host=127.0.0.1 --metrics_port={self.http_port} --logtostderr",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        self._command = [part for word in self._command for part in word.split()]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        """Also again, after :meth:`kill`; returns when it answers."""
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        until = time.monotonic() + READY_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                self._log.seek(0)
                raise RuntimeError(f"mooncake_master did not start:\n{self._log.read().decode()[-2000:]}")
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
        """How many requests of each kind it has served: its counters, but for those of clients that are only alive."""
        found = re.findall(r"^master_(\w+)_requests_total (\d+)", self._get("/metrics").decode(), re.MULTILINE)
        return {name: int(count) for name, count in found if name not in ("ping", "fetch_tasks")}

    def allocated(self) -> dict[str, int]:
        """Bytes in use of each segment that has any."""
        found = re.findall(r'^segment_allocated_bytes{segment="(.*)"} ([1-9]\d*)', self._get("/metrics").decode(), re.M)
        return {name: int(nbytes) for name, nbytes in found}

    def close(self) -> None:
        self.kill()
        self._log.close()

    def __enter__(self) -> MooncakeMaster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        """Its RPC may come up after its HTTP."""
        try:
            self._get("/health")
            socket.create_connection(("127.0.0.1", self.rpc_port), timeout=2).close()
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

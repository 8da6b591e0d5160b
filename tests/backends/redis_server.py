"""A real ``redis-server`` or ``valkey-server`` on a Unix socket."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import redis
from e2e.known import eventually

PATIENCE_S = 20.0


def program() -> str | None:
    """The server of this machine; None = there is none."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """In memory only. Options are its flags, as ``maxmemory="64mb"``."""

    def __init__(self, **options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="layerflow-redis-")
        self._flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = Path(self._folder.name) / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.client = redis.Redis.from_url(self.url)
        self.start()

    def start(self) -> None:
        """Empty, at the same address."""
        command = [str(program()), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", self._folder.name, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert eventually(self._answers, PATIENCE_S), "redis-server did not start"

    def kill(self) -> None:
        """SIGKILL; what it held is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        self.client.close()
        self.kill()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.exceptions.ConnectionError:
            return False

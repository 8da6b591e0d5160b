"""A client of a Mooncake store in a process of its own, which gives it memory and does nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from e2e.stopping import stop

from layerflow.hosts.mooncake.backend import Mooncake
from layerflow.system.memfd import SharedMemory


class Owner:
    """Started with the options of :class:`Mooncake`; returns when it is attached."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self._hear()

    def pause(self) -> None:
        stop(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the owner of the segment did not start")
        return str(json.loads(line))

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


def main() -> None:
    with SharedMemory.create(1 << 20) as arena:
        backend = Mooncake(json.loads(sys.argv[1]))
        attached = backend.attach(arena, lambda keys: None)
        print(json.dumps(attached.details["client"]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

"""A service that clients of a pool need, as a process on this machine: started, asked over HTTP, broken."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Self

from e2e.stopping import stop

READY_S = 30.0
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def _die_with_the_tests() -> None:
    """A test run that is killed leaves no service: of some only one can run on a machine."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ServiceProcess:
    """Runs until :meth:`close`.

    :param name: for messages.
    :param http_port: of 127.0.0.1, where it tells its health and counters.
    """

    def __init__(self, name: str, command: Sequence[str], http_port: int) -> None:
        self._http_port = http_port
        self._name, self._command = name, command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    def start(self) -> None:
        """Also again, after :meth:`kill`; returns when it answers."""
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=_die_with_the_tests,  # noqa: PLW1509 - one call of the kernel
        )
        until = time.monotonic() + READY_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                self._log.seek(0)
                raise RuntimeError(f"{self._name} did not start:\n{self._log.read().decode()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As an out-of-memory kill does."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        stop(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def check(self) -> None:
        """:raises OSError, HTTPException: it is not there, or not well."""
        self.get("/health")

    def figures(self, pattern: str) -> dict[str, int]:
        """Of its metrics, those whose line has the pattern: the groups of it are a name and a number."""
        return {name: int(figure) for name, figure in re.findall(pattern, self.get("/metrics").decode(), re.MULTILINE)}

    def get(self, path: str) -> bytes:
        """:raises OSError, HTTPException: no answer, or not the one that was asked for."""
        asked = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=2)
        try:
            asked.request("GET", path)
            answer = asked.getresponse()
            body = answer.read()
            if answer.status != http.HTTPStatus.OK:
                raise ConnectionError(f"{path}: {answer.status}")
            return body
        finally:
            asked.close()

    def close(self) -> None:
        self.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        try:
            self.check()
        except (OSError, http.client.HTTPException):
            return False
        return True

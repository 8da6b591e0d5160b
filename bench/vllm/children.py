"""Servers as child processes: each in a group of its own, its output in a file, never outliving the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

START_S = 300.0
STOP_S = 20.0
POLL_S = 0.2
TAIL_LINES = 25


class BenchFailed(Exception):
    """A server did not start, died or answered wrongly; the message ends with its own words."""


class Child:
    """A running server.

    :param name: what messages call it.
    :param command: the program and its arguments.
    :param environment: variables over this process's own.
    :param log: takes its output.
    :param health: URL that answers 200 when it serves.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], log: Path, health: str
    ) -> None:
        self.name, self.log, self._health = name, log, health
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def wait_healthy(self) -> None:
        """Until it serves.

        :raises BenchFailed: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + START_S
        with httpx.Client(trust_env=False, timeout=5) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(self._health).status_code == httpx.codes.OK:
                        return
                self.check()
                time.sleep(POLL_S)
        raise BenchFailed(f"{self.name} does not answer at {self._health} after {START_S:g} s\n{self.tail()}")

    def check(self) -> None:
        """:raises BenchFailed: it has ended."""
        if self._process.poll() is not None:
            raise BenchFailed(f"{self.name} ended with code {self._process.returncode}\n{self.tail()}")

    def tail(self) -> str:
        """Its last words."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self.log}:", *lines])

    def stop(self) -> None:
        """SIGTERM to the process, so that it ends its children in its own order; then SIGKILL to all that is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def stopped_at_the_end(children: list[Child]) -> Iterator[None]:
    """Whatever happens in the with-block, all children that were added to the list are stopped, the last first."""
    try:
        yield
    finally:
        for child in reversed(children):
            child.stop()

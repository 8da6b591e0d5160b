"""A pool's own calls, timed in a process of their own: native libraries crash and hang, and take nothing with them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from layerflow.config.pool import MEMORY
from layerflow.errors import ConfigError, LayerflowError
from layerflow.hosts.environment import environment

READY_S, CALL_S, STOP_S = 120.0, 60.0, 10.0
_SAID_BYTES = 1500  # of what the process printed, in an error


def module_of(kind: str) -> str:
    """Name of the module with a backend's raw calls."""
    return f"{__package__}.{kind}"


def check(kind: str) -> None:
    """:raises ConfigError: there are no raw calls to compare this backend with."""
    if kind != MEMORY and importlib.util.find_spec(module_of(kind)) is None:
        raise ConfigError(f"--kind {kind}: there are no raw calls to compare it with; see {__package__}")


class RawPool:
    """The child that makes the calls. It owns memory for the objects, warm once this is made.

    :param kind: ``memory``, or a backend with raw calls; see :func:`check`.
    :param options: of its backend, as a host process gets them.
    :param shape: objects of a round, layers of one, bytes of a layer of one.
    :raises LayerflowError: it did not get ready.
    """

    def __init__(self, kind: str, options: Mapping[str, Any], shape: tuple[int, int, int]) -> None:
        self._kind = kind
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "layerflow_cli.bench.pool.raw.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=(theirs.fileno(),),
            env=os.environ | environment(kind, options),
        )
        theirs.close()
        self._socket = ours
        self._replies = ours.makefile("rb")
        try:
            self._ask(READY_S, kind=kind, options=dict(options), shape=shape)
        except BaseException:
            self.close()
            raise

    def save(self, names: Sequence[str]) -> float:
        """Seconds that new objects of these names took."""
        return self._ask(CALL_S, call="save", names=names)

    def load(self, names: Sequence[str]) -> float:
        """Seconds that reading them back took."""
        return self._ask(CALL_S, call="load", names=names)

    def forget(self, names: Sequence[str]) -> None:
        """Remove these objects where the pool lets clients remove what another one wrote."""
        self._ask(CALL_S, call="forget", names=names)

    def close(self) -> None:
        """End it; what does not disconnect in time is killed."""
        self._socket.close()
        self._replies.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def __enter__(self) -> RawPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, timeout_s: float, **message: Any) -> float:
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._replies.readline()
        except OSError:
            line = b""
        answer = json.loads(line) if line else {"error": f"the process did not answer within {timeout_s:g} s, or died"}
        if "error" in answer:
            raise LayerflowError(f"raw calls to {self._kind}: {answer['error']}{self._printed()}")
        return float(answer["seconds"])

    def _printed(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _SAID_BYTES))
        text = self._said.read().decode(errors="replace").strip()
        return f"; it printed:\n{text}" if text else ""

"""Servers that are forked from a process which has their modules loaded: 0.1 s of CPU each instead of 0.7.

What runs is ``layerflow run`` with a process id, sockets, hosts and an end of its own, as if it had been started by the
shell: `test_run_command` and `cli/test_run` start theirs that way.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TextIO

PRELOAD = ("layerflow_cli.main", "layerflow_cli.serving", "layerflow.server.transport.http", "anyio._backends._asyncio")
_RUN = [sys.executable, "-m", "layerflow_cli"]
_MAX_REQUEST_BYTES = 1 << 16


class Forker:
    """The process to fork from, and the connection to it. It ends with the connection."""

    def __init__(self) -> None:
        self._path = os.environ.get("PYTHONPATH")
        self._one_at_a_time = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            # Its stdout, as that of a server whose lines are read, is no terminal.
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | Forked:
        """Start ``python -m layerflow_cli ...``; its stdout can be read. By exec if it is to find other modules."""
        if list(command[: len(_RUN)]) != _RUN or environment.get("PYTHONPATH") != self._path:
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        said, stdout = os.pipe()
        ended, status = os.pipe()
        wanted = json.dumps([list(command[len(_RUN) :]), dict(environment), os.getcwd()]).encode()
        assert len(wanted) <= _MAX_REQUEST_BYTES
        try:
            with self._one_at_a_time:
                socket.send_fds(self._socket, [wanted], [0, stdout, 2, status])
                pid = int(self._socket.recv(_MAX_REQUEST_BYTES))
        finally:
            os.close(stdout)
            os.close(status)
        return Forked(pid, os.fdopen(said), ended)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Forked:
    """What :class:`subprocess.Popen` is for a child of ours, for one of the forker's."""

    def __init__(self, pid: int, stdout: TextIO, ended: int) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._ended = ended

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._ended)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative if it was a signal."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["layerflow", "run"], timeout or 0.0)
            self.returncode = int(os.read(self._ended, 16))
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it is reaped at once, its exit code comes a moment later
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# In the process to fork from -----------------------------------------------------------------------------------------


def _fork_on_request(connection: socket.socket) -> Sequence[str] | None:
    """Fork until the connection ends. In a child: its arguments."""
    children: dict[int, tuple[int, int]] = {}  # by pidfd: process id, where its exit code is awaited
    while True:
        for ready in select.select([connection, *children], [], [])[0]:
            if ready is not connection:
                pid, status = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # who started it is gone, or does not care
                    os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            wanted, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 4)
            if not wanted:
                return None
            pid = os.fork()
            if pid == 0:
                connection.detach()
                return _become(*json.loads(wanted), fds)
            connection.send(str(pid).encode())
            for fd in fds[:3]:
                os.close(fd)
            children[os.pidfd_open(pid)] = (pid, fds[3])


def _become(arguments: Sequence[str], environment: Mapping[str, str], folder: str, fds: Sequence[int]) -> Sequence[str]:
    """Have what a process has that was started with these."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return arguments


def main() -> None:
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # the collector of a child touches none of these pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the children's affair, and pytest's
    arguments = _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        from layerflow_cli.main import main as layerflow

        sys.argv[1:] = arguments
        layerflow()


if __name__ == "__main__":
    main()

"""A memcache backend in a process of its own: the library allows one client a process, in an environment of its own."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from e2e.stopping import stop

from layerflow.hosts.backend import Backend, BackendInfo, ObjectLocation, ObjectResult, pool_name
from layerflow.hosts.environment import environment
from layerflow.hosts.memcache.backend import Memcache
from layerflow.system.memfd import SharedMemory

CLOSE_S = 5.0


class RemoteMemcache(Backend):
    """Passes every call to the process; what it raises is raised here.

    :param options: of :class:`Memcache`.
    :param arena: where places lie.
    :param patches: module of `layerflow.hosts`, name and value of constants.
    """

    def __init__(
        self, options: dict[str, Any], arena: SharedMemory, patches: Sequence[tuple[str, str, object]] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(arena.fd), str(arena.nbytes)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **environment("memcache", options),
            },
            pass_fds=[theirs.fileno(), arena.fd],
            stdout=self.log,
            stderr=self.log,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._lock = threading.Lock()
        for module, name, value in patches:
            self.patch(module, name, value)
        self.address: int = self.call("begin", options)

    def call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self.send(method, *arguments)
            return self.answer()

    def send(self, method: str, *arguments: Any) -> None:
        """Without waiting for the answer."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Of the oldest call."""
        try:
            failed, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the client has ended: {self._process.wait()}; {self.said()}") from None
        if failed:
            raise answer
        return answer

    def said(self) -> str:
        """The end of what the process and the library wrote."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-3000:]

    def patch(self, module: str, name: str, value: object) -> None:
        """Of `layerflow.hosts`: a constant, before it is used."""
        self.call("patch", f"layerflow.hosts.{module}", name, value)

    def library(self, method: str, *arguments: Any) -> Any:
        """The library's own method, as another program of the pool might call it."""
        return self.call("library", method, *arguments)

    @property
    def nice(self) -> int:
        """Of the thread that has attached."""
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        stop(self._process.pid)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        return self._process.wait(CLOSE_S)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> int:
        """Close the client and the process; its exit code. As a host does: closing waits for leases on its memory."""
        if self._process.poll() is None:
            self.send("close")
            if not self._pipe.poll(CLOSE_S):
                self.kill()
        self._pipe.close()
        code = self._process.wait(CLOSE_S)
        self.log.close()
        return code

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        return self.call("attach_here")

    def check(self) -> None:
        self.call("check")

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        return self.call("lookup", keys, until)

    def hide(self, keys: Sequence[bytes]) -> None:
        self.call("hide", keys)

    def statistics(self) -> dict[str, float]:
        return self.call("statistics")

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self.call("open_fetch", places, until)

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self.call("fetch", places, lo, hi, until)

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        self.call("close_fetch", places)

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self.call("open_write", places, until)

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        return self.call("write", places, lo, hi, until)

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return self.call("commit", places, until)

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        self.call("revoke", places)

    def close(self) -> None:
        self.end()


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    arena = SharedMemory.attach(int(sys.argv[2]), int(sys.argv[3]))
    backend: Memcache | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if method == "begin":
                backend = Memcache(*arguments)
                answer: Any = arena.address
            elif method == "patch":
                module, name, value = arguments
                answer = setattr(importlib.import_module(module), name, value)
            elif method == "info":
                assert backend is not None
                answer = [tuple(each) for each in backend._calls.info([pool_name(*arguments)], complete=False)]
            elif method == "library":  # past the backend, as another program would
                assert backend is not None
                answer = backend._calls._call(*arguments)
            elif method == "attach_here":
                assert backend is not None
                answer = backend.attach(arena, lambda keys: None)
            else:
                answer = getattr(backend, method)(*arguments)
            pipe.send((False, answer))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            try:
                pickle.dumps(error)
            except Exception:  # noqa: BLE001
                error = RuntimeError(repr(error))
            pipe.send((True, error))
        if method == "close":
            break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

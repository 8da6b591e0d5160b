"""A TCP relay between a reader and an exporter: slow, or cut in the middle."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable


class Relay:
    """Listens, and passes bytes both ways.

    :param target: ``host:port``.
    :param rate: bytes per second from the target; 0 = as they come.
    :param pause_s: before each of its answers is passed on; where the bytes themselves do not come this way.
    :param cut_after: bytes from the target after which everything is hung up on, once; 0 = never.
    """

    def __init__(self, target: str, rate: float = 0, cut_after: int = 0, pause_s: float = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.rate, self.cut_after, self.pause_s = rate, cut_after, pause_s
        self.passed = 0
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Cut every connection."""
        for each in self._open:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            self._pump(near, far, self._pass)
            self._pump(far, near, self._pass_slowly)

    def _pump(self, source: socket.socket, sink: socket.socket, work: Callable[[bytes, socket.socket], None]) -> None:
        def run() -> None:
            try:
                while data := source.recv(1 << 16):
                    work(data, sink)
            except OSError:
                pass
            finally:
                for each in (source, sink):
                    try:
                        each.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue

        threading.Thread(target=run, name="relay", daemon=True).start()

    def _pass(self, data: bytes, sink: socket.socket) -> None:
        sink.sendall(data)

    def _pass_slowly(self, data: bytes, sink: socket.socket) -> None:
        if self.rate or self.pause_s:
            time.sleep(self.pause_s + (len(data) / self.rate if self.rate else 0))  # what a slow link is
        if self.cut_after and not self.cuts and self.passed + len(data) > self.cut_after:
            sink.sendall(data[: self.cut_after - self.passed])
            self.passed = self.cut_after
            self.cuts += 1
            raise OSError("cut")
        sink.sendall(data)
        self.passed += len(data)

"""A TCP relay between a reader and an exporter: slow, or cut in the middle."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

from layerflow_testing.tcp_relay import TcpRelay


class Relay(TcpRelay):
    """Passes bytes both ways.

    :param target: ``host:port``.
    :param rate: bytes per second from the target; 0 = as they come.
    :param pause_s: before each of its answers is passed on; where the bytes themselves do not come this way.
    :param cut_after: bytes from the target after which everything is hung up on, once; 0 = never.
    :param alter: what is passed on of what came from the target.
    :ivar heard: what came from the other end.
    :ivar hold_at: once more bytes than these have passed from the target, nothing of it passes; it may be raised.
    """

    def __init__(
        self,
        target: str,
        rate: float = 0,
        cut_after: int = 0,
        pause_s: float = 0,
        alter: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.rate, self.cut_after, self.pause_s = rate, cut_after, pause_s
        self.alter, self.heard = alter, bytearray()
        self.passed = 0
        self.hold_at = math.inf
        self.cuts = 0
        super().__init__(target)

    def _serve(self, near: socket.socket) -> None:
        with self._connect() as far:
            there = threading.Thread(target=_pump, args=(near, far, self._pass), name="relay", daemon=True)
            there.start()
            _pump(far, near, self._pass_slowly)
            there.join()

    def _pass(self, data: bytes, sink: socket.socket) -> None:
        self.heard += data
        sink.sendall(data)

    def _pass_slowly(self, data: bytes, sink: socket.socket) -> None:
        while self.passed > self.hold_at:
            time.sleep(0.001)
        if self.rate or self.pause_s:
            time.sleep(self.pause_s + (len(data) / self.rate if self.rate else 0))  # what a slow link is
        if self.cut_after and not self.cuts and self.passed + len(data) > self.cut_after:
            sink.sendall(data[: self.cut_after - self.passed])
            self.passed = self.cut_after
            self.cuts += 1
            raise OSError("cut")
        sink.sendall(self.alter(data))
        self.passed += len(data)


def _pump(source: socket.socket, sink: socket.socket, work: Callable[[bytes, socket.socket], None]) -> None:
    """Until either end hangs up; then both have."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            work(data, sink)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)

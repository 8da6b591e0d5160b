"""What relays of TCP have in common: they listen, serve each connection on a thread of its own, and cut all at once."""

from __future__ import annotations

import abc
import contextlib
import socket
import threading


class TcpRelay(abc.ABC):
    """Listens at ``port`` of 127.0.0.1 from the start on.

    :param target: ``host:port`` of the server; "" = it is told later, before anybody connects.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Cut everything; its threads have ended when this returns."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def hang_up(self) -> None:
        """Cut every connection that there is; those who come back at once are let in."""
        for each in [*self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @abc.abstractmethod
    def _serve(self, near: socket.socket) -> None:
        """A client has connected; an OSError ends this."""

    def _connect(self) -> socket.socket:
        """To the server."""
        host, _, port = self.target.rpartition(":")
        far = socket.create_connection((host, int(port)))
        self._open.append(far)
        return far

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            self._threads.append(threading.Thread(target=self._run, args=(near,), name="relay", daemon=True))
            self._threads[-1].start()

    def _run(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            self._serve(near)

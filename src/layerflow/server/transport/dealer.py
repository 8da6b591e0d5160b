"""A server's connection to the control socket of another one: a ZMQ DEALER read from asyncio's own loop."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

import zmq

from layerflow.system.descriptors import FOR_CLIENTS, has_room

MAX_WAITING = 1000
"""Messages that wait to be sent, or to be read, in ZMQ."""
_READS = 64
DESCRIPTORS = 6
"""Of one connection, with ZMQ's own and the monitor's."""


class Dealer:
    """Connects at once, on the running loop. ZMQ connects again by itself; its owner decides what counts.

    :param keys: (server's public, own secret and public) CURVE keys in Z85; None = ``ipc://``.
    :param heard: told each message.
    :param hung_up: told that the connection was lost; perhaps several times.
    :raises OSError: few file descriptors are left. libzmq is not asked for what it may end the process over.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: tuple[bytes, bytes, bytes] | None,
        max_bytes: int,
        heard: Callable[[bytes], None],
        hung_up: Callable[[], None],
    ) -> None:
        self._heard, self._hung_up = heard, hung_up
        self._loop = asyncio.get_running_loop()
        self._again = False
        self._closed = False
        if not has_room(DESCRIPTORS, FOR_CLIENTS):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            socket.curve_serverkey, socket.curve_secretkey, socket.curve_publickey = keys
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fds = int(socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))
        for fd in self._fds:
            self._loop.add_reader(fd, self._read)
        socket.connect(endpoint)
        self._schedule()

    def send(self, frame: bytes) -> bool:
        """Queue one frame; False = too many wait already."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._schedule()
        return True

    def close(self) -> None:
        """Hang up; nothing is told any more."""
        if self._closed:
            return
        self._closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _schedule(self) -> None:
        if not self._again and not self._closed:
            self._again = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """ZMQ's descriptors tell of changes only: read until nothing is left, or come back."""
        self._again = False
        for _ in range(_READS):
            if self._closed:
                return
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._heard(frames[0])
            elif int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                self._hung_up()
            else:
                return
        self._schedule()

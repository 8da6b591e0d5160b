"""The control socket at ``inproc://``: a ZMQ ROUTER read from asyncio's own loop.

ZMQ's file descriptor is edge-triggered and may fire for any state change, so after every wake-up, every send and every
other look at the socket's events they are asked again until nothing is left to read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq

from layerflow.errors import ConfigError

FLUSH_MS = 100
"""How long the last messages may take to leave after the socket was closed; a stopped client holds up no exit."""

_FRAMES_PER_LOOK = 64

READ_S = 0.0005
"""How long messages are read and handled before the loop's timers and other descriptors get their turn, in seconds."""


class Router:
    """Owns the ROUTER socket.

    :param context: shared with in-process clients in embedded mode.
    :param on_message: called on the loop with the client's identity and its message's only frame; None in its place:
        there were several, which are dropped as they are read.
    :param max_bytes: larger messages are cut off by ZMQ itself, with the connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[bytes, bytes | None], None],
        max_bytes: int,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self.socket.setsockopt(zmq.SNDHWM, 10_000)
        self.socket.setsockopt(zmq.RCVHWM, 10_000)
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._again = False
        self._many: bytes | None = None  # who sends the message of several frames that is being dropped

    def bind(self, endpoint: str) -> None:
        """:raises ConfigError: the endpoint is in use or not usable."""
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}; is another server running there?"
            ) from None

    def start(self) -> None:
        """Begin reading on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        self._schedule()

    def close(self) -> None:
        """Stop reading and close; what is unsent after :data:`FLUSH_MS` is dropped."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        self.socket.close(linger=FLUSH_MS)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Queue one frame for a client; False if it is gone or does not read."""
        try:
            self.socket.send_multipart((identity, frame), zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            self._schedule()
        return True

    def pending(self) -> bool:
        """Does a message wait to be read? It will be: asking takes back what the descriptor has to tell of it."""
        waiting = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if waiting:
            self._schedule()
        return waiting

    def _schedule(self) -> None:
        if not self._again and self._loop is not None:
            self._again = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._again = False
        if self._loop is None:
            return
        until = time.monotonic() + READ_S
        while self.pending():  # which schedules: whatever a message's handling raises, those behind it are read
            if self._many is None:
                identity, frame = self.socket.recv(zmq.NOBLOCK), self.socket.recv(zmq.NOBLOCK)
                if not self.socket.getsockopt(zmq.RCVMORE):
                    self._on_message(identity, frame)
                else:
                    self._many = identity
            if self._many is not None and self._dropped(until):
                identity, self._many = self._many, None
                self._on_message(identity, None)
            if time.monotonic() >= until:
                return

    def _dropped(self, until: float) -> bool:
        """Read and drop what is left of a message of several frames; False: its end is not reached at `until`."""
        receive = self.socket.recv
        while self.socket.getsockopt(zmq.RCVMORE):
            for _ in range(_FRAMES_PER_LOOK):
                receive(zmq.NOBLOCK)
                if not self.socket.getsockopt(zmq.RCVMORE):
                    return True
            if time.monotonic() >= until:
                return False
        return True

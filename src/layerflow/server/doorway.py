"""The Unix socket beside the control socket: hands out the arena and notices death by hang-up.

A client connects, sends the 16-byte token of its Welcome and receives the arena's memfd
(SCM_RIGHTS) with its size. It keeps the connection open: when either process dies, the kernel closes
it and the other end knows at once, without waiting for a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import structlog

from layerflow.errors import ConfigError

TOKEN_BYTES = 16
ARENA = struct.Struct("<Q")
_BACKLOG = 64
MAX_WAITING = 64
"""Connections that have not named their token yet; past this the oldest is dropped."""

TOKEN_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.5

log = structlog.get_logger("layerflow.server.doorway")


class Doorway:
    """Listens at `path` on the running loop.

    :param fd: the arena's memfd.
    :param nbytes: the arena's size.
    :param on_entered: called with a token when its client has the arena; False = unknown token, refused.
    :param on_gone: called with the token when that client's process (or connection) is gone.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        nbytes: int,
        on_entered: Callable[[bytes], bool],
        on_gone: Callable[[bytes], None],
    ) -> None:
        self._path = path
        self._fd = fd
        self._nbytes = nbytes
        self._on_entered = on_entered
        self._on_gone = on_gone
        self._guests: dict[socket.socket, bytes] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Bind with owner-only permissions and begin accepting.

        :raises ConfigError: another server answers there. (ZMQ would take its control socket over silently.)
        """
        if _answers(self._path):
            raise ConfigError(f"{self._path}: another server is running at this endpoint; stop it or choose another")
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        previous = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(previous)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Hang up on everybody and remove the socket file."""
        if self._loop is None:
            self._listener.close()
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for guest in list(self._guests):
            self._forget(guest)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._loop = None

    def dismiss(self, token: bytes) -> None:
        """Hang up on one client without reporting it gone."""
        for guest, held in list(self._guests.items()):
            if held == token:
                self._forget(guest)

    def _accept(self) -> None:
        assert self._loop is not None
        try:
            guest, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The listener stays readable: without a pause the loop would do nothing else.
            log.warning("doorway_accept_failed", error=str(error), pause_s=ACCEPT_PAUSE_S)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        guest.setblocking(False)
        waiting = [known for known, token in self._guests.items() if not token]
        if len(waiting) >= MAX_WAITING:
            self._forget(waiting[0])
        self._guests[guest] = b""
        self._loop.add_reader(guest, self._hear, guest)
        self._loop.call_later(TOKEN_TIMEOUT_S, self._expect_token, guest)

    def _resume(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _expect_token(self, guest: socket.socket) -> None:
        if self._guests.get(guest) == b"":
            self._forget(guest)

    def _hear(self, guest: socket.socket) -> None:
        try:
            said = guest.recv(TOKEN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        token = self._guests[guest]
        if not token and len(said) == TOKEN_BYTES and self._on_entered(said):
            try:
                socket.send_fds(guest, [ARENA.pack(self._nbytes)], [self._fd])
            except OSError as error:
                log.warning("doorway_handover_failed", error=str(error))
                self._forget(guest)
                self._on_gone(said)
                return
            self._guests[guest] = said
            return
        self._forget(guest)
        if token:
            self._on_gone(token)

    def _forget(self, guest: socket.socket) -> None:
        if self._loop is not None:
            self._loop.remove_reader(guest)
        self._guests.pop(guest, None)
        guest.close()


def _answers(path: Path) -> bool:
    """Does a process listen there? A file that a killed server left behind does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as visitor:
        try:
            visitor.connect(str(path))
        except OSError:
            return False
    return True

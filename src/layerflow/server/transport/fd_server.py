"""The Unix socket beside the control socket: hands out shared memory and notices death by hang-up.

A client connects, sends the 16-byte token of its Welcome and one byte for what it wants: the arena, to move
bytes, or the presence table, to look up. It receives the memfd (SCM_RIGHTS) with its size, and keeps the
connection open: when either process dies, the kernel closes it and the other end knows at once, without
waiting for a heartbeat.

A hang-up alone is no death: a process that lives may still write to the arena that it has mapped. Whoever has the
arena is gone when its process has ended (its pidfd says so), or when it has said :data:`QUIET` before it hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from layerflow.observe.logs import LogRateLimiter
from layerflow.system.descriptors import FOR_WORKERS, leaves
from layerflow.system.unix_sockets import listen_privately, peer_pidfd, peer_user, peer_user_is_own
from layerflow.wire.messages import QUIET, WANT_ARENA

TOKEN_BYTES = 16
_SIZE = struct.Struct("<Q")
MAX_WAITING = 64
"""Connections that have not named their token yet; past this the oldest is dropped."""

TOKEN_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.5
"""How long no connection is accepted after one had to be turned away."""

_FOREIGN = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""Of pidfd_open: the process is in another pid namespace, or has ended."""

SWEEP_S = 1.0
DYING_S = 0.5
"""A process whose connection was closed so long ago, and that has not ended, is said to live."""

log = structlog.get_logger("layerflow.server.transport.fd_server")


class SharedRegion(NamedTuple):
    """Shared memory to hand out: its memfd and its size."""

    fd: int
    nbytes: int


NO_ROOM = SharedRegion(-1, 0)
"""This server has none of that: the client is told a size of 0 and given no descriptor, and may stay."""


class FdServer:
    """Listens at `path` on the running loop.

    :param rooms: what there is, by the byte that asks for it.
    :param on_entered: called with token and byte before a client is let in; False = refused.
    :param on_gone: called with the token, and why, when that client can touch what it was given no more.
    :param on_hang_up: called with the token when that client has hung up and its process lives.
    :param may_stay: asked every :data:`SWEEP_S` with the token of each client: "", or why it is hung up on.
    """

    def __init__(
        self,
        path: Path,
        rooms: Mapping[bytes, SharedRegion],
        *,
        on_entered: Callable[[bytes, bytes], bool],
        on_gone: Callable[[bytes, str], None],
        on_hang_up: Callable[[bytes], None],
        may_stay: Callable[[bytes], str],
    ) -> None:
        self._path = path
        self._rooms = rooms
        self._on_entered = on_entered
        self._on_gone = on_gone
        self._on_hang_up = on_hang_up
        self._may_stay = may_stay
        self._connections: dict[socket.socket, bytes] = {}
        self._processes: dict[bytes, int] = {}  # pidfds of those that have the arena, by token
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._log_limit = LogRateLimiter()

    def start(self) -> None:
        """Bind with owner-only permissions and begin accepting.

        :raises ConfigError: another server answers there.
        """
        self._listener = listen_privately(self._path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Hang up on everybody and remove the socket file."""
        if self._loop is None or self._listener is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self._connections):
            self._forget(connection)
        for token in list(self._processes):
            self._release(token)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._loop = None

    def _accept(self) -> None:
        assert self._loop is not None
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._turn_away(str(error))
            return
        if not leaves(connection.fileno(), FOR_WORKERS):
            connection.close()
            self._turn_away("few file descriptors are left")
            return
        connection.setblocking(False)
        waiting = [known for known, token in self._connections.items() if not token]
        if len(waiting) >= MAX_WAITING:
            self._forget(waiting[0])
        self._connections[connection] = b""
        self._loop.add_reader(connection, self._hear, connection)
        self._loop.call_later(TOKEN_TIMEOUT_S, self._expect_token, connection)

    def _turn_away(self, error: str) -> None:
        """The listener stays readable: without a pause the loop would do nothing else."""
        assert self._loop is not None
        assert self._listener is not None
        log.warning("fd_server_accept_failed", error=error, pause_s=ACCEPT_PAUSE_S)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._loop is not None and self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _expect_token(self, connection: socket.socket) -> None:
        if self._connections.get(connection) == b"":
            self._forget(connection)

    def _hear(self, connection: socket.socket) -> None:
        try:
            said = connection.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        token = self._connections[connection]
        if token:
            self._forget(connection)
            self._hung_up(token, said)
            return
        token, wanted = said[:TOKEN_BYTES], said[TOKEN_BYTES:]
        room = self._rooms.get(wanted)
        if room is None or not self._same_user(connection):
            self._forget(connection)
            return
        process = None
        if wanted == WANT_ARENA:
            try:
                process = self._process(connection)
            except OSError as error:
                # Its death could not be seen, and a hang-up is none: it may try again.
                self._log("fd_server_handover_failed", error=str(error))
                self._forget(connection)
                return
        if not self._on_entered(token, wanted):
            self._forget(connection)
            if process is not None:
                os.close(process)
            return
        try:
            socket.send_fds(connection, [_SIZE.pack(room.nbytes)], [room.fd] if room.nbytes else [])
        except OSError as error:
            self._log("fd_server_handover_failed", error=str(error))
            self._forget(connection)
            if process is not None:
                os.close(process)
            self._on_gone(token, "hung_up")
            return
        self._connections[connection] = token
        if process is not None:
            self._processes[token] = process

    def _sweep(self) -> None:
        assert self._loop is not None
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)
        for connection, token in list(self._connections.items()):
            if token and (why := self._may_stay(token)):
                self._forget(connection)
                self._release(token)
                self._on_gone(token, why)

    def _hung_up(self, token: bytes, said: bytes) -> None:
        process = self._processes.get(token)
        if process is None or said == QUIET:
            self._release(token)
            self._on_gone(token, "hung_up")
            return
        # The kernel closes a dying process's connections a moment before it reports the death.
        assert self._loop is not None
        self._loop.add_reader(process, self._died, token)
        self._loop.call_later(DYING_S, self._still_alive, token)

    def _died(self, token: bytes) -> None:
        self._release(token)
        self._on_gone(token, "died")

    def _still_alive(self, token: bytes) -> None:
        if token in self._processes:
            self._on_hang_up(token)

    def _release(self, token: bytes) -> None:
        process = self._processes.pop(token, None)
        if process is not None:
            if self._loop is not None:
                self._loop.remove_reader(process)
            os.close(process)

    def _forget(self, connection: socket.socket) -> None:
        if self._loop is not None:
            self._loop.remove_reader(connection)
        self._connections.pop(connection, None)
        connection.close()

    def _same_user(self, connection: socket.socket) -> bool:
        """Does the client belong to this server's user, or to root?"""
        if peer_user_is_own(connection):
            return True
        self._log("fd_server_stranger", uid=peer_user(connection))
        return False

    def _process(self, connection: socket.socket) -> int | None:
        """A pidfd of the client's process; None: it is in another pid namespace, and its hang-up has to do.

        :raises OSError: none can be had now.
        """
        try:
            process = peer_pidfd(connection)
        except OSError as error:
            if error.errno not in _FOREIGN:
                raise
            self._log("fd_server_no_pidfd", error=str(error), effect="its hang-up counts as its death")
            return None
        if not leaves(process, FOR_WORKERS // 2):
            os.close(process)
            raise OSError(errno.EMFILE, "few file descriptors are left")
        return process

    def _log(self, event: str, **more: object) -> None:
        unlogged = self._log_limit.admit(time.monotonic())
        if unlogged is not None:
            log.warning(event, unlogged=unlogged, **more)

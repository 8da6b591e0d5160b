"""The process at the other end of a Unix socket: a hang-up is no death, so whoever must know asks for the process."""

from __future__ import annotations

import os
import select
import socket
import struct

_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, Linux 6.5
_CREDENTIALS = struct.Struct("@iII")


def peer_user(connection: socket.socket) -> int:
    """Its user's id."""
    return _credentials(connection)[1]


def is_here(connection: socket.socket) -> bool:
    """Is it this process?"""
    return _credentials(connection)[0] == os.getpid()


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of it, which the caller closes. Of a listener's end: of the process that listens.

    :raises OSError: it is in another pid namespace, or has ended.
    """
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pid = _credentials(connection)[0]
    try:
        return os.pidfd_open(pid)
    except OverflowError as error:
        raise OSError(str(error)) from None


def has_died(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Has the process ended, or does it within `timeout_s`?"""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(round(timeout_s * 1e3)))


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid

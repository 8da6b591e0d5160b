"""The process at the other end of a Unix socket: a hang-up is no death, so whoever must know asks for the process."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, Linux 6.5
_CREDENTIALS = struct.Struct("@iII")


def peer_user(connection: socket.socket) -> int:
    """Its user's id."""
    return _credentials(connection)[1]


def peer_user_is_own(connection: socket.socket) -> bool:
    """Does it belong to this process's user, or to root?"""
    return peer_user(connection) in (os.getuid(), 0)


def peer_process(connection: socket.socket) -> int:
    """Its number; 0 = it is in a pid namespace that this process does not see."""
    return _credentials(connection)[0]


def is_here(connection: socket.socket) -> bool:
    """Is it this process?"""
    return _credentials(connection)[0] == os.getpid()


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of it, which the caller closes. Of a listener's end: of the process that listens.

    :raises OSError: ESRCH, ENOENT or EINVAL: it has ended, or is in another pid namespace on Linux before 6.5; else
        none can be had now.
    """
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
    try:
        return os.pidfd_open(_credentials(connection)[0])
    except OverflowError as error:
        raise OSError(errno.ESRCH, str(error)) from None


def sees_other_namespaces() -> bool:
    """Can a peer's process be had from another pid namespace? Linux before 6.5 cannot give it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
    return True


def has_died(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Has the process ended, or does it within `timeout_s`?"""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(round(timeout_s * 1e3)))


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid

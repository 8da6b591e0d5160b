"""Unix sockets that only this user's processes can connect to, and the process at the other end of one."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from pathlib import Path

from layerflow.errors import ConfigError

# The process at the other end of a Unix socket: a hang-up is no death, so whoever must know asks for the process.


_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, Linux 6.5
_CREDENTIALS = struct.Struct("@iII")


def peer_user(connection: socket.socket) -> int:
    """Return the user id at the other end."""
    return _credentials(connection)[1]


def peer_user_is_own(connection: socket.socket) -> bool:
    """Does it belong to this process's user, or to root?"""
    return peer_user(connection) in (os.getuid(), 0)


def peer_process(connection: socket.socket) -> int:
    """Return the process at the other end; 0 = it is in a pid namespace that this process does not see."""
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


BACKLOG = 128


def listen_privately(path: Path, advice: str = "is another server running there?") -> socket.socket:
    """Listen at `path`, in a directory of this user's own.

    No process can connect before listen(2), when the mode is right: the process's umask stays as it is.

    :param advice: what to do where it cannot be.
    :raises ConfigError: a process listens there, another file is there, or the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path.is_socket():
            _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; {advice}") from None
    return listener


def why_not_listening(path: Path) -> str:
    """Why no process accepts connections at `path`; "" = one does, or has its hands full."""
    error, _ = _visit(path)
    if error in (0, errno.EAGAIN):
        return ""
    if error == errno.ENOENT:
        return "there is no socket"
    if error == errno.ECONNREFUSED:
        return "the process that listened there has ended"
    return os.strerror(error)


def listener_of(path: Path) -> int | None:
    """The number of the process that listens at `path`, 0 = it cannot be seen from here; None = none listens."""
    error, process = _visit(path)
    return process if error in (0, errno.EAGAIN) else None


def _visit(path: Path) -> tuple[int, int]:
    """The error of connecting, and the process at the other end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as visitor:
        visitor.setblocking(False)  # a process that does not accept holds nobody up
        error = visitor.connect_ex(str(path))
        return error, 0 if error else peer_process(visitor)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended; one that is listened on stays, and cannot be bound."""
    if _visit(path)[0] in (errno.ECONNREFUSED, errno.ENOENT):
        path.unlink(missing_ok=True)

"""Unix sockets that only this user's processes can connect to."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from layerflow.errors import ConfigError
from layerflow.system.peer import peer_process

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

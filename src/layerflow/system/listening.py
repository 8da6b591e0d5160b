"""Unix sockets that only this user's processes can connect to."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from layerflow.errors import ConfigError

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


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended; one that is listened on stays, and cannot be bound."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as visitor:
        visitor.setblocking(False)  # who does not accept holds nobody up
        if visitor.connect_ex(str(path)) in (errno.ECONNREFUSED, errno.ENOENT):
            path.unlink(missing_ok=True)

"""Unix sockets that only this user's processes can connect to."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from layerflow.errors import ConfigError

BACKLOG = 128


def listen_privately(path: Path) -> socket.socket:
    """Listen at `path`, in a directory of this user's own.

    No process can connect before listen(2), when the mode is right: the process's umask stays as it is.

    :raises ConfigError: another server answers there, or the socket cannot be made.
    """
    if _answers(path):
        raise ConfigError(f"{path}: another server is running at this endpoint; stop it or choose another")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on ipc://{path}: {error.strerror or error}; is another server running there?"
        ) from None
    return listener


def _answers(path: Path) -> bool:
    """Does a process listen there? A file that a killed server left behind does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as visitor:
        try:
            visitor.connect(str(path))
        except OSError:
            return False
    return True

"""The Unix socket of the admin paths: who can connect to it is this user, or root."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import structlog

from layerflow.config.proxy import MAX_SOCKET_PATH_BYTES
from layerflow.config.settings import make_private
from layerflow.endpoint import default_endpoint, socket_directory
from layerflow.errors import ConfigError
from layerflow.system.listening import listen_privately

_AUTO = "auto"
_log = structlog.get_logger("layerflow.proxy")


def admin_socket_path(setting: str, host: str, port: int) -> Path:
    """Where the socket of a proxy lies that listens on `host` and `port`.

    :param setting: ``proxy.admin_socket``, not empty.
    """
    if setting != _AUTO:
        return Path(setting)
    folder = socket_directory(default_endpoint())
    assert folder is not None
    return folder / f"proxy-{host}:{port}.sock"


@contextlib.contextmanager
def listening(setting: str, host: str, port: int) -> Iterator[socket.socket | None]:
    """A socket that listens; None where the setting asks for none, or "auto" finds no place for it.

    :raises ConfigError: there can be none where the setting says.
    """
    listener = None
    path = admin_socket_path(setting, host, port) if setting else None
    if path is not None:
        try:
            listener = _listen(path)
        except ConfigError as error:
            if setting != _AUTO:
                raise
            _log.warning("no_admin_socket", reason=str(error))
    if listener is None or path is None:
        yield None
        return
    try:
        _log.info("admin_socket", path=str(path))
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_SOCKET_PATH_BYTES} bytes; give proxy.admin_socket another path")
    make_private(path.parent)
    return listen_privately(path, "give proxy.admin_socket another path")

"""An HTTP server in a loop that has other work too, and whose owner takes the signals."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from layerflow.errors import ConfigError

_SHUTDOWN_S = 1


class UvicornServer(uvicorn.Server):
    """uvicorn in a loop that is not its own; ``should_exit`` ends it.

    :param backlog: connections that wait to be accepted.
    :param accepting: called once requests are accepted.
    """

    def __init__(self, app: Starlette, backlog: int, accepting: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            backlog=backlog,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        super().__init__(config)
        self._accepting = accepting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._accepting()

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until it is told to exit, or cancelled."""
        try:
            await self.serve(sockets=[listener])
        finally:
            # uvicorn closes its listeners only on the orderly way out.
            for accepting in getattr(self, "servers", ()):
                accepting.close()


def listen(host: str, port: int, backlog: int, advice: str) -> socket.socket:
    """A bound socket; binding here, not in uvicorn, which ends the process where it cannot.

    :param port: 0 = any free one.
    :param advice: what to do where it cannot be bound.
    :raises ConfigError: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error, advice) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error, advice) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """With the real port."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _refused(host: str, port: int, error: OSError, advice: str) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}")

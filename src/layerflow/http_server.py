"""An HTTP server in a loop that has other work too, whose owner takes the signals; its connections are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from layerflow.errors import ConfigError
from layerflow.system.descriptors import FOR_HTTP, leaves

_SHUTDOWN_S = 1
MAX_CONNECTIONS = 64
KEEP_ALIVE_S = 75
"""How long a connection may be without a request, in whole seconds. Clients and load balancers keep theirs for less
(httpx 5 s, nginx and AWS's 60 s) and close first; else a request may be on its way to a connection that is gone. An
idle connection holds up nobody, see :class:`UvicornServer`."""
HEAD_S = 8.0
"""How long a request's head may take, from the connection or from its first byte, in seconds."""
_HEAD_BYTES = 64 << 10
"""Most of a request's head, and of its trailers."""
SLOWEST_BODY = 16 << 10
"""Bytes per second of a request's body: slower ones hold a connection that others need."""
HEAD_GRACE_S = 1.0
"""A head that takes longer makes room for a new connection, in seconds: over a bad link, too, decent ones take less."""
BODY_GRACE_S = 3.0
"""So does a body that is further behind :data:`SLOWEST_BODY`, in seconds."""


class UvicornServer(uvicorn.Server):
    """uvicorn in a loop that is not its own; ``should_exit`` ends it.

    :param backlog: connections that wait to be accepted.
    :param accepting: called once requests are accepted.
    :param most: connections at once. One more takes another's place, the longest one's of the first kind that there is:
        without a request; with a head that has not come for longer than a decent one takes; with a body slower than
        :data:`SLOWEST_BODY`; with a head that may be coming. Else it is closed itself: requests that are whole, or come
        as a decent client's do, are ended for nobody.
    """

    def __init__(
        self, app: Starlette, backlog: int, accepting: Callable[[], None], most: int = MAX_CONNECTIONS
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_bounded(most),
            h11_max_incomplete_event_size=_HEAD_BYTES,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            # Where a request comes from is what the socket says: a header is anybody's to write.
            proxy_headers=False,
            backlog=backlog,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            timeout_keep_alive=KEEP_ALIVE_S,
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


class _Claim(IntEnum):
    """A connection's to its place, the weakest first."""

    IDLE = 0
    SLOW_HEAD = 1
    SLOW_BODY = 2
    NEW = 3
    REQUEST = 4


def _bounded(most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol of one connection, for a server that has at most so many."""

    # Not what uvicorn finds, httptools where an engine has brought it: that keeps headers and trailers of any size.
    class BoundedProtocol(H11Protocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_timer: asyncio.TimerHandle | None = None
            self._since = 0.0  #: without a request, with a head that is coming, or with a body that is
            self._body_bytes = 0  #: of the request that is coming

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()
            if len(self.connections) > most:
                others: set[Any] = self.connections
                ended = min(others, key=lambda one: (one.claim, one._since))
                self.connections.discard(ended)  # no next one takes its place again before it is lost
                ended.transport.abort()
            elif not leaves(transport.get_extra_info("socket").fileno(), FOR_HTTP):
                transport.abort()

        @property
        def busy(self) -> bool:
            """Has a request's head come, and is it neither answered nor given up with bytes that nobody takes?"""
            return self.cycle is not None and not (self.cycle.response_complete or self.transport.is_closing())

        @property
        def asked(self) -> bool:
            """Is a request coming, or here? So is a first one that has not begun."""
            return self.busy or self._head_timer is not None

        @property
        def claim(self) -> _Claim:
            """How good its claim is to its place. A new connection's is weaker than that of a decent request."""
            lasted = self.loop.time() - self._since
            if self.busy:
                slow = self.cycle.more_body and lasted > BODY_GRACE_S + self._body_bytes / SLOWEST_BODY
                return _Claim.SLOW_BODY if slow else _Claim.REQUEST
            if not self.asked:
                return _Claim.IDLE
            return _Claim.SLOW_HEAD if lasted > HEAD_GRACE_S else _Claim.NEW

        def data_received(self, data: bytes) -> None:
            if not self.asked:
                self._await_head()
            super().data_received(data)
            if not self.busy:
                return
            if self._head_timer is None:
                self._body_bytes += len(data)
            else:
                self._stop_timer()
                self._since, self._body_bytes = self.loop.time(), len(self.cycle.body)

        def on_response_complete(self) -> None:
            self._since, self._body_bytes = self.loop.time(), 0
            super().on_response_complete()

        def _await_head(self) -> None:
            self._since = self.loop.time()
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedProtocol

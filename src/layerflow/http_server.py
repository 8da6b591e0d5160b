"""An HTTP server in a loop that has other work too, whose owner takes the signals; its connections are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import socket
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import h11
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
"""How long a request's head may take, from the connection or from its first byte; an answer that waits for its client
makes room for a new connection when it is further behind :data:`SLOWEST_BODY`. In seconds."""
_HEAD_BYTES = 64 << 10
"""Most of a request's head, and of its trailers."""
SLOWEST_BODY = 16 << 10
"""Bytes per second of a request's body, and of an answer that waits for its client: slower ones hold a connection that
others need."""
HEAD_GRACE_S = 1.0
"""A head that takes longer makes room for a new connection, in seconds: over a bad link, too, decent ones take less."""
BODY_GRACE_S = 3.0
"""So does a body that is further behind :data:`SLOWEST_BODY`, in seconds. A connection has them for all its requests:
what one takes of them, those after it lack until one comes faster, or the connection has had no request for as long."""
_IPV6_NETWORK_BYTES = 8


class UvicornServer(uvicorn.Server):
    """uvicorn in a loop that is not its own; ``should_exit`` ends it.

    :param backlog: connections that wait to be accepted.
    :param accepting: called once requests are accepted.
    :param most: connections at once. One more takes another's place, one's of the first kind that there is: without a
        request; with a head that has not come for longer than a decent one takes; with a body slower than
        :data:`SLOWEST_BODY`; with an answer that its client takes slower; with a head that may be coming, or any body
        or pipelined request of an origin (see :func:`origin_of`) that has more than half of all connections, for
        another one. Of these it is the origin's with most, and of its own the longest one's. Else it is closed itself:
        other requests that are whole, and answers that clients take, are ended for nobody.
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


def origin_of(client: tuple[str, int] | None) -> bytes:
    """Whose connections are counted together: those of an IPv4 address, or of an IPv6 network of 64 bits.

    Whoever has one address of such a network has all of them.

    :param client: its address and port; None = it has none, as over a Unix socket.
    """
    if client is None:
        return b""
    address = ipaddress.ip_address(client[0])
    if address.version == 4:
        return address.packed
    mapped = address.ipv4_mapped  # where one socket listens for both
    return address.packed[:_IPV6_NETWORK_BYTES] if mapped is None else mapped.packed


class _Claim(IntEnum):
    """A connection's to its place, the weakest first."""

    IDLE = 0
    SLOW_HEAD = 1
    SLOW_BODY = 2
    SLOW_ANSWER = 3
    NEW = 4
    FAIR = 5  #: good while its origin has no more than half of all places
    WHOLE = 6


def _bounded(most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol of one connection, for a server that has at most so many."""

    # Not what uvicorn finds, httptools where an engine has brought it: that keeps headers and trailers of any size.
    class BoundedProtocol(H11Protocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_timer: asyncio.TimerHandle | None = None
            self._since = 0.0  #: without a request, with a head that is coming, or with a body that is
            self._grace_s = BODY_GRACE_S  #: of the connection, that its bodies may be behind
            self._late_at = 0.0  #: the body that is coming, unless more of it comes
            self._origin = b""
            self._pipelined = False  #: its next request had begun when one was answered: it is never without one
            self._waits_since = 0.0  #: an answer, for its client to take as fast as that is asked from here on
            self._untaken = 0  #: bytes of it by then

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._origin = origin_of(self.client)
            self._await_head()
            if len(self.connections) > most:
                ended = self._first_to_go()
                self.connections.discard(ended)  # no next one takes its place again before it is lost
                ended.transport.abort()
            elif not leaves(transport.get_extra_info("socket").fileno(), FOR_HTTP):
                transport.abort()

        def _first_to_go(self) -> Any:
            """Whose place this new one takes; itself, where there is nobody's. See :class:`UvicornServer`."""
            others: set[Any] = self.connections
            counts = Counter(one._origin for one in others)
            own, now = counts[self._origin], self.loop.time()

            def rank(one: Any) -> tuple[_Claim, int, _Claim, float]:
                claim, count = one._claim(now), counts[one._origin]
                # The new one may never send a request.
                gives_way = claim is _Claim.FAIR and count > own and count > most // 2
                return _Claim.NEW if gives_way else claim, -count, claim, one._since

            return min(others, key=rank)

        @property
        def _busy(self) -> bool:
            """Has a request's head come, and is it neither answered nor given up with bytes that nobody takes?"""
            return self.cycle is not None and not (self.cycle.response_complete or self.transport.is_closing())

        def _claim(self, now: float) -> _Claim:
            """How good its claim is to its place. A new connection's is weaker than that of a decent request."""
            if self._busy and self.cycle.more_body:
                return _Claim.SLOW_BODY if now > self._late_at else _Claim.FAIR
            if self._busy or self._is_taking:
                if (self.flow.write_paused or self._is_taking) and self._takes_too_slowly(now):
                    return _Claim.SLOW_ANSWER
                return _Claim.FAIR if self._pipelined else _Claim.WHOLE
            if self._head_timer is None:  # nor is the first one awaited
                return _Claim.IDLE
            return _Claim.SLOW_HEAD if now > self._since + HEAD_GRACE_S else _Claim.NEW

        @property
        def _is_taking(self) -> bool:
            """Is an answer made, and its client still to take some of it?"""
            return bool(
                self.cycle is not None and self.cycle.response_complete and self.transport.get_write_buffer_size()
            )

        def _takes_too_slowly(self, now: float) -> bool:
            """Is an answer that waits late?"""
            left = self._left_to_take()
            taken = self._untaken - left
            if now > self._waits_since + HEAD_S + taken / SLOWEST_BODY:
                return True
            if taken >= (now - self._waits_since) * SLOWEST_BODY:
                self._waits_since, self._untaken = now, left  # what its own system has taken at once buys no minutes
            return False

        def _left_to_take(self) -> int:
            """Bytes that its client has not taken.

            The system takes on what waits here once a third of what it keeps itself has gone, which is a megabyte at
            times: what it keeps counts.
            """
            kept = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            return int(self.transport.get_write_buffer_size()) + int.from_bytes(kept, sys.byteorder)

        def _await_taking(self) -> None:
            self._waits_since, self._untaken = self.loop.time(), self._left_to_take()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_taking()

        def data_received(self, data: bytes) -> None:
            body_came = self._busy and self.cycle.more_body
            if not self._busy and self._head_timer is None:
                # It was the first to go. Decent bodies are late, too, by what the way from their client takes.
                self._grace_s = min(self._grace_s + self.loop.time() - self._since, BODY_GRACE_S)
                self._await_head()
            super().data_received(data)
            if not self._busy:
                return
            if self._head_timer is not None:
                self._stop_timer()
                self._begin_body()
            elif body_came:
                self._late_at += len(data) / SLOWEST_BODY
                if not self.cycle.more_body:
                    self._end_body()

        def on_response_complete(self) -> None:
            if self.cycle.more_body:
                self._end_body()
            self._since = self.loop.time()
            self._pipelined = bool(self.conn.trailing_data[0])
            if self._is_taking and not self.flow.write_paused:
                self._await_taking()
            super().on_response_complete()
            if self._busy:  # with a request that had come behind the one that is answered
                self._begin_body()

        def send_400_response(self, msg: str) -> None:
            # What is no HTTP may come behind a request that is being answered, or has been. h11 takes one answer, and
            # none with a body to HEAD.
            if self.cycle is not None:
                self.cycle.disconnected = True
            state = self.conn.our_state
            if state is h11.IDLE or (state is h11.SEND_RESPONSE and self.scope["method"] != "HEAD"):
                super().send_400_response(msg)
            else:
                self.transport.close()

        def _await_head(self) -> None:
            self._since = self.loop.time()
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

        def _begin_body(self) -> None:
            """A request's head has come, and maybe all of it."""
            self._since = self.loop.time()
            self._late_at = self._since + self._grace_s + len(self.cycle.body) / SLOWEST_BODY
            if not self.cycle.more_body:
                self._end_body()

        def _end_body(self) -> None:
            # A fast one gives back what slow ones took, and no more: the next may not drip for as long as it saved.
            self._grace_s = min(max(self._late_at - self.loop.time(), 0.0), BODY_GRACE_S)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedProtocol

"""A store's metadata service, as seen without the store's library: is it up, is it well, is it still the same one?

The libraries cannot be asked. While Mooncake's master is dead its ``health_check()`` stays 0 and calls block for
seconds; while memcache's MetaService hangs each call blocks for a minute. And a service that was started again knows
of no lease and of no allocation: its predecessor's memory is given to other objects.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from layerflow.findings import http_get
from layerflow.hosts.backend import Unreachable

# Is a store's metadata service up, and which start of it is this?


HTTP_S = 0.8
SEGMENTS_S = 5.0
"""How long a list of segments is good for."""


class HttpProbe:
    """One service's.

    :param url: ``http://host:port``; ``""`` = there is none, and every answer is empty.
    :param whose: for messages, e.g. ``Mooncake's master``.
    :param metric: name of the gauge with the bytes of each client's memory.
    :raises ValueError: its port is no number.
    """

    def __init__(self, url: str, whose: str, metric: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port or 80) if parts.hostname else None
        self._url, self._whose = url.rstrip("/"), whose
        self._segment = re.compile(rb'^%b\{segment="[^"]*"\} (\d+)' % metric.encode(), re.MULTILINE)
        self._look_again = 0.0
        self._largest = 0

    def get(self, path: str) -> bytes:
        """What it says there.

        :raises Unreachable: it does not answer, or not with 200.
        """
        if self.address is None:
            return b""
        url = self._url + path
        why, body = http_get(url, HTTP_S, most_bytes=None)  # its figures of every segment may be long
        if why:
            said = f"{self._whose} does not answer as it should at {url}: {why}"
            raise Unreachable(f"{said}; is it running? Look at its log")
        return body

    def largest_segment(self) -> int:
        """Bytes of the largest client's memory, at most :data:`SEGMENTS_S` old; 0 = not known."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + SEGMENTS_S
            try:
                self._largest = max(map(int, self._segment.findall(self.get("/metrics"))), default=0)
            except Unreachable:
                self._largest = 0
        return self._largest


CONNECT_S = 0.5


class ServiceMonitor:
    """Holds a TCP connection on which nothing is ever said.

    A service that is started again answers at the same address the next moment, but it knows of no lease and
    gives their memory to others. The end of the connection cannot be missed.

    :param address: host and port.
    :param whose: for messages, e.g. ``memcache's MetaService``.
    :param advice: what to do where it does not answer.
    """

    def __init__(self, address: tuple[str, int], whose: str, advice: str) -> None:
        self._address, self._whose, self._advice = address, whose, advice
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._starts = 0
        self._inode = 0  # of the connection, which tells it from another under the same number

    @property
    def lost(self) -> int:
        """How often the service was found to have ended."""
        return max(0, self._starts - 1)

    @property
    def generation(self) -> int:
        """A number that changes when the service ends or is lost; 0 = it is not there now. Sends nothing."""
        return self._starts if self._holds() else 0

    def reach(self) -> int:
        """Return the service's :attr:`generation`, after connecting again where that is needed.

        :raises Unreachable: it does not accept a connection.
        """
        with self._lock:
            if not self._holds():
                self._drop()
                self._connection = self._connect()
                self._starts += 1
            return self._starts

    def close(self) -> None:
        """Drop the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            if self._ours(self._connection):
                self._connection.close()
            else:
                self._connection.detach()
            self._connection = None

    def _ours(self, connection: socket.socket) -> bool:
        """Is the descriptor still this connection? memfabric closes one twice when a handshake fails; in between the
        number may have become ours, and be another's again afterwards.
        """
        try:
            return os.fstat(connection.fileno()).st_ino == self._inode
        except OSError:
            return False

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
            # So that a service whose machine vanished without a word is noticed within four seconds too.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setblocking(False)
            self._inode = os.fstat(connection.fileno()).st_ino
        except OSError as error:
            host, port = self._address
            at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise Unreachable(f"{self._whose} does not answer at {at}: {error}; {self._advice}") from error
        return connection

    def _holds(self) -> bool:
        connection = self._connection
        if connection is None or not self._ours(connection):
            return False
        # Not select: it knows no descriptors above 1023. The service never says anything on it: any event is its end.
        poll = select.poll()
        try:
            poll.register(connection, select.POLLIN | select.POLLRDHUP)
        except ValueError:  # closed meanwhile
            return False
        return not poll.poll(0)


class Service:
    """One metadata service's addresses.

    :param whose: for messages, e.g. ``Mooncake's master``.
    :param monitor: of the port whose connection tells when the service ends.
    :param http: the service's HTTP.
    :param held: the connection is kept. False: :meth:`check` only knocks, and :attr:`generation` never changes.
    :param ready: whether the body of ``/health`` says that the service is well.
    """

    def __init__(
        self,
        whose: str,
        monitor: ServiceMonitor,
        http: HttpProbe,
        *,
        held: bool = True,
        ready: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self._whose, self._monitor, self._http, self._held, self._ready = whose, monitor, http, held, ready
        self._illness: tuple[int, str] = (-1, "")  # the generation in which the last check failed, and why

    @property
    def lost(self) -> int:
        """How often the service was found to have ended."""
        return self._monitor.lost if self._held else 0

    @property
    def generation(self) -> int:
        """A number that changes when the service ends or is lost; 0 = it is not there now. Sends nothing."""
        return self._monitor.generation if self._held else 1

    @property
    def ill(self) -> str:
        """Why the last check failed, until the next one passes or the service is another; empty = it is well.

        A call to a service that hangs would block its lane for seconds, and each job behind it as long again.
        """
        generation, why = self._illness
        return why if why and generation == self.generation else ""

    def reach(self) -> int:
        """The :attr:`generation`, after connecting again where that is needed.

        :raises Unreachable: it does not accept a connection.
        """
        return self._monitor.reach() if self._held else 1

    def check(self, probe: Callable[[], None] = lambda: None) -> None:
        """Look; what was found decides over :attr:`ill`.

        :param probe: what else must get through.
        :raises Unreachable: it accepts no connection, its HTTP does not say that it is well, or the probe says so.
        """
        try:
            self._look()
            probe()
        except Unreachable as error:
            self._illness = (self.generation, str(error))
            raise
        self._illness = (-1, "")

    def largest_segment(self) -> int:
        """See :meth:`HttpProbe.largest_segment`."""
        return self._http.largest_segment()

    def close(self) -> None:
        """Drop the connection."""
        self._monitor.close()

    def _look(self) -> None:
        self._monitor.reach()
        if not self._held:
            self._monitor.close()
            return
        body = self._http.get("/health")
        if not self._ready(body):
            raise Unreachable(f"{self._whose} is not ready: {body[:200].decode(errors='replace')}")

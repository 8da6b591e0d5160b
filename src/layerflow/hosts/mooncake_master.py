"""Mooncake's master as seen without its library: is it there, is it well, is it still the same one?

The library itself cannot tell: its ``health_check()`` stays 0 while the master is dead, and each of its
calls then blocks for seconds.
"""

from __future__ import annotations

import http.client
import re
import select
import socket
import threading
import time
from urllib.parse import urlsplit

from layerflow.hosts.backend import Unreachable

CONNECT_S = 0.5
HTTP_S = 0.8
SEGMENTS_S = 5.0
"""How long a list of segments is good for."""
_SEGMENT = re.compile(rb'^segment_total_capacity_bytes\{segment="[^"]*"\} (\d+)', re.MULTILINE)


class Master:
    """One master's address.

    It holds a connection on which nothing is ever said. That it ends says at once, and surely, that the master
    ended, even if another one answers at its address the next moment. That matters: a new master knows of no lease
    and of no session, and gives their memory to others.

    :param address: of its RPC, ``host:port``.
    :param http_url: of its HTTP; ``""`` = ask nothing there.
    """

    def __init__(self, address: str, http_url: str) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._at = address, (host.strip("[]"), int(port))
        self._http = urlsplit(http_url)
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._term = 0
        self._look_again = 0.0
        self._largest = 0

    @property
    def lost(self) -> int:
        """How often it was found to have ended."""
        return max(0, self._term - 1)

    @property
    def term(self) -> int:
        """A number that changes when the master ends or is lost; 0 = it is not there now."""
        return self._term if self._line_holds() else 0

    def reach(self) -> int:
        """Its :attr:`term`, after connecting again where that is needed.

        :raises Unreachable: it does not accept a connection.
        """
        with self._lock:
            if not self._line_holds():
                if self._line is not None:
                    self._line.close()
                    self._line = None
                self._line = self._connect()
                self._term += 1
            return self._term

    def check(self) -> None:
        """:raises Unreachable: it accepts no connection, or its HTTP does not say that it is well."""
        self.reach()
        if self._http.netloc:
            self._get("/health")

    def largest_segment(self) -> int:
        """Bytes of the largest client's memory, at most :data:`SEGMENTS_S` old; 0 = not known."""
        now = time.monotonic()
        if self._http.netloc and now >= self._look_again:
            self._look_again = now + SEGMENTS_S
            try:
                self._largest = max(map(int, _SEGMENT.findall(self._get("/metrics"))), default=0)
            except Unreachable:
                self._largest = 0
        return self._largest

    def close(self) -> None:
        """Drop the connection."""
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None

    def _get(self, path: str) -> bytes:
        asked = http.client.HTTPConnection(self._http.netloc, timeout=HTTP_S)
        url = f"{self._http.geturl().rstrip('/')}{path}"
        try:
            asked.request("GET", self._http.path.rstrip("/") + path)
            answer = asked.getresponse()
            status, body = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"Mooncake's master does not answer at {url}: {error}; is it running?") from error
        finally:
            asked.close()
        if status != http.HTTPStatus.OK:
            raise Unreachable(f"Mooncake's master is not well: {url} says {status}")
        return body

    def _connect(self) -> socket.socket:
        try:
            line = socket.create_connection(self._at, timeout=CONNECT_S)
        except OSError as error:
            raise Unreachable(
                f"Mooncake's master does not answer at {self.address}: {error}; start mooncake_master there, or set "
                "pool.mooncake.master"
            ) from error
        # So that a master whose machine vanished without a word is noticed within four seconds too.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            line.setsockopt(socket.IPPROTO_TCP, option, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        line.setblocking(False)
        return line

    def _line_holds(self) -> bool:
        line = self._line
        if line is None:
            return False
        try:
            # The master never says anything on it: whatever there is to read is its end.
            return not select.select([line], [], [], 0)[0]
        except (OSError, ValueError):  # closed meanwhile
            return False

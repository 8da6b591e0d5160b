"""memcache's MetaService as seen without its library: is it there, is it well, is it still the same one?

The library cannot be asked: while the MetaService hangs, each of its calls blocks for a minute. The silent line goes
to the HTTP port. On the others it would be fatal: the MetaService admits no client while a connection says nothing.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from urllib.parse import urlsplit

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.line import CONNECT_S, Line

HTTP_S = 0.8
SEGMENTS_S = 5.0
"""How long a list of segments is good for."""
_WHOSE = "memcache's MetaService"
_SEGMENT = re.compile(rb'^memcache_segment_capacity_bytes\{segment="[^"]*"\} (\d+)', re.MULTILINE)


def tcp_address(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    :raises ValueError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{url!r}: write tcp://host:port")
    return parts.hostname, parts.port


class MetaService:
    """One MetaService's addresses.

    :param url: where clients connect, ``tcp://host:port``.
    :param http_url: of its HTTP; ``""`` = there is none. Then :attr:`term` never changes, and that the MetaService was
        started again is known only to the library, from a second after.
    """

    def __init__(self, url: str, http_url: str) -> None:
        self._at = tcp_address(url)
        self._http = urlsplit(http_url)
        self._line: Line | None = None
        if self._http.hostname:
            advice = "start a MetaService there, or set pool.memcache.metrics_url"
            self._line = Line((self._http.hostname, self._http.port or 80), _WHOSE, advice)
        self._look_again = 0.0
        self._largest = 0

    @property
    def lost(self) -> int:
        """How often it was found to have ended."""
        return self._line.lost if self._line else 0

    @property
    def term(self) -> int:
        """See :attr:`Line.term`."""
        return self._line.term if self._line else 1

    def reach(self) -> int:
        """See :meth:`Line.reach`."""
        return self._line.reach() if self._line else 1

    def check(self) -> None:
        """:raises Unreachable: it accepts no connection, or its HTTP does not say that it is well."""
        if self._line is None:
            self._knock()
            return
        self._line.reach()
        body = self._get("/health")
        try:
            told = json.loads(body)
            well = told["status"] == "ok" and told.get("service_ready", True)
        except (ValueError, TypeError, KeyError):
            well = False
        if not well:
            raise Unreachable(f"{_WHOSE} is not ready: {body[:200].decode(errors='replace')}")

    def largest_segment(self) -> int:
        """Bytes of the largest client's memory, at most :data:`SEGMENTS_S` old; 0 = not known."""
        now = time.monotonic()
        if self._line and now >= self._look_again:
            self._look_again = now + SEGMENTS_S
            try:
                self._largest = max(map(int, _SEGMENT.findall(self._get("/metrics"))), default=0)
            except Unreachable:
                self._largest = 0
        return self._largest

    def close(self) -> None:
        """Drop the connection."""
        if self._line:
            self._line.close()

    def _knock(self) -> None:
        host, port = self._at
        try:
            socket.create_connection(self._at, timeout=CONNECT_S).close()
        except OSError as error:
            raise Unreachable(
                f"{_WHOSE} does not answer at {host}:{port}: {error}; start one there, or set "
                "pool.memcache.meta_service_url"
            ) from error

    def _get(self, path: str) -> bytes:
        # Not urllib: it asks for `Connection: close`, and then the MetaService sends no body.
        asked = http.client.HTTPConnection(self._http.netloc, timeout=HTTP_S)
        url = f"{self._http.geturl().rstrip('/')}{path}"
        try:
            asked.request("GET", self._http.path.rstrip("/") + path)
            answer = asked.getresponse()
            status, body = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{_WHOSE} does not answer at {url}: {error}; is it running?") from error
        finally:
            asked.close()
        if status != http.HTTPStatus.OK:
            raise Unreachable(f"{_WHOSE} is not well: {url} says {status}")
        return body

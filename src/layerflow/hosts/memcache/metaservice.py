"""memcache's MetaService as seen without its library: is it there, is it well, is it still the same one?

The library cannot be asked: while the MetaService hangs, each of its calls blocks for a minute. The silent line goes
to the HTTP port. On the others it would be fatal: the MetaService admits no client while a connection says nothing.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.shared.service import HttpProbe, ServiceMonitor

_WHOSE = "memcache's MetaService"


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
    :param http_url: of its HTTP; ``""`` = there is none. Then :attr:`generation` never changes, and that the
        MetaService was started again is known only to the library, from a second after.
    """

    def __init__(self, url: str, http_url: str) -> None:
        self._door = ServiceMonitor(tcp_address(url), _WHOSE, "start one there, or set pool.memcache.meta_service_url")
        self._web = HttpProbe(http_url, _WHOSE, "memcache_segment_capacity_bytes")
        self._line: ServiceMonitor | None = None
        if self._web.address:
            advice = "start a MetaService there, or set pool.memcache.metrics_url"
            self._line = ServiceMonitor(self._web.address, _WHOSE, advice)

    @property
    def lost(self) -> int:
        """How often it was found to have ended."""
        return self._line.lost if self._line else 0

    @property
    def generation(self) -> int:
        """See :attr:`ServiceMonitor.generation`."""
        return self._line.generation if self._line else 1

    def reach(self) -> int:
        """See :meth:`ServiceMonitor.reach`."""
        return self._line.reach() if self._line else 1

    def check(self) -> None:
        """:raises Unreachable: it accepts no connection, or its HTTP does not say that it is well."""
        if self._line is None:
            self._door.reach()
            self._door.close()  # at once: it would be fatal there
            return
        self._line.reach()
        body = self._web.get("/health")
        try:
            told = json.loads(body)
            well = told["status"] == "ok" and told.get("service_ready", True)
        except (ValueError, TypeError, KeyError):
            well = False
        if not well:
            raise Unreachable(f"{_WHOSE} is not ready: {body[:200].decode(errors='replace')}")

    def largest_segment(self) -> int:
        """See :meth:`HttpProbe.largest_segment`."""
        return self._web.largest_segment()

    def close(self) -> None:
        """Drop the connection."""
        if self._line:
            self._line.close()

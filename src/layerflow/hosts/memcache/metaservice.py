"""memcache's MetaService as seen without its library; see :mod:`layerflow.hosts.shared.service`.

The silent connection goes to the HTTP port. On the others it would be fatal: the MetaService admits no client while a
connection says nothing.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from layerflow.hosts.shared.service import HttpProbe, Service, ServiceMonitor

_WHOSE = "memcache's MetaService"


def tcp_address(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    :raises ValueError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{url!r}: write tcp://host:port")
    return parts.hostname, parts.port


class MetaService(Service):
    """One MetaService's addresses.

    :param url: where clients connect, ``tcp://host:port``.
    :param http_url: of its HTTP; ``""`` = there is none. Then :attr:`generation` never changes, and that the
        MetaService was started again is known only to the library, from a second after.
    """

    def __init__(self, url: str, http_url: str) -> None:
        http = HttpProbe(http_url, _WHOSE, "memcache_segment_capacity_bytes")
        if http.address:
            monitor = ServiceMonitor(
                http.address, _WHOSE, "start a MetaService there, or set pool.memcache.metrics_url"
            )
        else:
            monitor = ServiceMonitor(tcp_address(url), _WHOSE, "start one there, or set pool.memcache.meta_service_url")
        super().__init__(_WHOSE, monitor, http, held=http.address is not None, ready=ready)


def ready(body: bytes) -> bool:
    """Whether it says at ``/health`` that it serves."""
    try:
        told = json.loads(body)
        return bool(told["status"] == "ok" and told.get("service_ready", True))
    except (ValueError, TypeError, KeyError):
        return False

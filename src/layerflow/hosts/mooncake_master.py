"""Mooncake's master as seen without its library: is it there, is it well, is it still the same one?

The library itself cannot tell: its ``health_check()`` stays 0 while the master is dead, and each of its
calls then blocks for seconds. And a new master knows of no lease and of no session.
"""

from __future__ import annotations

from layerflow.hosts.line import Line
from layerflow.hosts.web import Web

_WHOSE = "Mooncake's master"
_ADVICE = "start mooncake_master there, or set pool.mooncake.master"


class Master:
    """One master's addresses.

    :param address: of its RPC, ``host:port``.
    :param http_url: of its HTTP; ``""`` = ask nothing there.
    """

    def __init__(self, address: str, http_url: str) -> None:
        host, _, port = address.rpartition(":")
        self._line = Line((host.strip("[]"), int(port)), _WHOSE, _ADVICE)
        self._web = Web(http_url, _WHOSE, "segment_total_capacity_bytes")

    @property
    def lost(self) -> int:
        """How often it was found to have ended."""
        return self._line.lost

    @property
    def term(self) -> int:
        """See :attr:`Line.term`."""
        return self._line.term

    def reach(self) -> int:
        """See :meth:`Line.reach`."""
        return self._line.reach()

    def check(self) -> None:
        """:raises Unreachable: it accepts no connection, or its HTTP does not say that it is well."""
        self._line.reach()
        self._web.get("/health")

    def largest_segment(self) -> int:
        """See :meth:`Web.largest_segment`."""
        return self._web.largest_segment()

    def close(self) -> None:
        """Drop the connection."""
        self._line.close()

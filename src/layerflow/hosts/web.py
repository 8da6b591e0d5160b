"""A service's HTTP, asked for two things: is it well, and how much memory does its largest client give?"""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from urllib.parse import urlsplit

from layerflow.hosts.backend import Unreachable

HTTP_S = 0.8
SEGMENTS_S = 5.0
"""How long a list of segments is good for."""


class Web:
    """One service's.

    :param url: ``http://host:port``; ``""`` = there is none, and every answer is empty.
    :param whose: for messages, e.g. ``Mooncake's master``.
    :param metric: name of the gauge with the bytes of each client's memory.
    :raises ValueError: its port is no number.
    """

    def __init__(self, url: str, whose: str, metric: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port or 80) if parts.hostname else None
        self._url, self._path, self._whose = url.rstrip("/"), parts.path.rstrip("/"), whose
        self._segment = re.compile(rb'^%b\{segment="[^"]*"\} (\d+)' % metric.encode(), re.MULTILINE)
        self._look_again = 0.0
        self._largest = 0

    def get(self, path: str) -> bytes:
        """What it says there.

        :raises Unreachable: it does not answer, or not with 200.
        """
        if self.address is None:
            return b""
        # Not urllib: it asks for `Connection: close`, and then memcache's MetaService sends no body.
        url = self._url + path
        try:
            with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=HTTP_S)) as asked:
                asked.request("GET", self._path + path)
                answer = asked.getresponse()
                status, body = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._whose} does not answer at {url}: {error}; is it running?") from error
        if status != http.HTTPStatus.OK:
            raise Unreachable(f"{self._whose} is not well: {url} says {status}; look at its log")
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

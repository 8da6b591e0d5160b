"""HTTP as a client: which calls go through the proxies that the environment names (``http_proxy`` and the like).

Engines, their metaservers and whatever is on this machine are asked directly: a proxy of the environment is for the
world outside. What may go through one is a URL of another machine that a user has typed.
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse
from urllib.parse import urlsplit

from layerflow.config.fields import is_loopback

TRUST_ENVIRONMENT = False
"""For every client of httpx here, whose ``trust_env`` it is."""


def open_url(url: str, timeout_s: float) -> HTTPResponse:
    """GET an http URL that a user has typed.

    :raises OSError: no answer, or one that is an error (:class:`urllib.error.HTTPError`).
    :raises ValueError: no URL.
    """
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(f"{urlsplit(url).hostname}:0") else []
    opener = urllib.request.build_opener(*handlers)
    answer: HTTPResponse = opener.open(url, timeout=timeout_s)
    return answer

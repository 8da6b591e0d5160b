"""Bodies of requests, bounded in size and time, and of refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import Response

from layerflow.config.proxy import ProxySettings
from layerflow.errors import ProxyError
from layerflow.proxy.outlet import ClientGone, error_body

_SMALL_BYTES = 4 << 20
_QUERY = "!$&'()*+,;=:@/?%"  # RFC 3986, and what is quoted already
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, settings: ProxySettings, most: int | None = None) -> bytes:
    """The request's body.

    :param most: bytes that it may have, if not ``max_request_bytes``.
    :raises ProxyError: it is too large, or does not come.
    :raises ClientGone: the client left.
    """
    most = min(most or settings.max_request_bytes, settings.max_request_bytes)
    content = bytearray()
    while True:
        try:
            with anyio.fail_after(settings.idle_timeout_s):
                message = await receive()
        except TimeoutError:
            raise ProxyError(f"the request's body did not come in {settings.idle_timeout_s:g} s", 408) from None
        if message["type"] == "http.disconnect":
            raise ClientGone("while it sent its request")
        content += message.get("body", b"")
        if len(content) > most:
            which = " (proxy.max_request_bytes)" if most == settings.max_request_bytes else ""
            raise ProxyError(f"the request is larger than {most} bytes{which}", 413)
        if not message.get("more_body"):
            return bytes(content)


async def read_small_body(receive: Receive, settings: ProxySettings) -> bytes:
    """The same for a path that has no stream to end: at most 4 MiB, and all of it within ``idle_timeout_s``.

    :raises ProxyError: also where the client left.
    """
    try:
        with anyio.fail_after(settings.idle_timeout_s):
            return await read_body(receive, settings, _SMALL_BYTES)
    except TimeoutError:
        raise ProxyError(f"the request's body did not come in {settings.idle_timeout_s:g} s", 408) from None
    except ClientGone as gone:
        raise ProxyError(f"the client left {gone}", 400) from None


def path_of(request: Request) -> str:
    """The request's path and query, for an engine."""
    query = request.scope["query_string"].decode("latin-1")
    return f"{request.scope['path']}?{quote(query, safe=_QUERY)}" if query else str(request.scope["path"])


def refusal(error: ProxyError) -> Response:
    """The error as every path tells it."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return Response(error_body(error), error.status, headers, media_type="application/json")

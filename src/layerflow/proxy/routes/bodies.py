"""Bodies of requests, bounded in size and time, and of refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
from starlette.responses import Response

from layerflow.config.proxy import ProxySettings
from layerflow.errors import ProxyError
from layerflow.proxy.outlet import ClientGone, error_body

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, settings: ProxySettings) -> bytes:
    """The request's body.

    :raises ProxyError: it is too large, or does not come.
    :raises ClientGone: the client left.
    """
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
        if len(content) > settings.max_request_bytes:
            most = settings.max_request_bytes
            raise ProxyError(f"the request is larger than {most} bytes (proxy.max_request_bytes)", 413)
        if not message.get("more_body"):
            return bytes(content)


async def read_small_body(receive: Receive, settings: ProxySettings) -> bytes:
    """The same for a path that has no stream to end. :raises ProxyError: also where the client left."""
    try:
        return await read_body(receive, settings)
    except ClientGone as gone:
        raise ProxyError(f"the client left {gone}", 400) from None


def refusal(error: ProxyError) -> Response:
    """The error as every path tells it."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return Response(error_body(error), error.status, headers, media_type="application/json")

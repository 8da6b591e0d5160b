"""One POST to an engine: which headers it gets, and what its failures mean."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from layerflow.errors import UpstreamError
from layerflow.proxy.instances.instance import Instance

Headers = Sequence[tuple[str, str]]

# RFC 9110 7.6.1, what is said for one connection only; and what the proxy decides itself.
_ONE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
)
_FRAMING = frozenset(
    ("transfer-encoding", "upgrade", "host", "expect", "content-length", "content-type", "content-encoding")
)
_OURS = _ONE_CONNECTION | _FRAMING | {"accept-encoding", "date", "server"}
_ELSEWHERE = (408, 425, 429)
"""Refusals that are about the engine's moment, not about the request: another engine may take it."""


def passed_on(headers: Headers) -> list[tuple[str, str]]:
    """The headers that go on to the other side, known to the proxy or not."""
    return [(name, value) for name, value in headers if name.lower() not in _OURS]


def engine_headers(headers: Headers, request_id: str) -> list[tuple[str, str]]:
    """What an engine gets: the client's headers, under the leg's own request id."""
    kept = [(name, value) for name, value in passed_on(headers) if name.lower() != "x-request-id"]
    return [
        *kept,
        ("x-request-id", request_id),
        ("content-type", "application/json"),
        ("accept-encoding", "identity"),
    ]


@asynccontextmanager
async def post(instance: Instance, path: str, body: bytes, headers: Headers) -> AsyncIterator[httpx.Response]:
    """The engine's answer, status 200, its body not read yet. Leaving closes it: the engine sees its client go.

    :raises UpstreamError: the engine cannot be reached, breaks off (also inside the block) or answers another status.
    """
    engine = f"{instance.role.value} engine {instance.url}"
    try:
        response = await _send(instance, path, body, headers)
        try:
            if response.status_code != httpx.codes.OK:
                raise await _refusal(engine, response)
            yield response
        finally:
            await response.aclose()
    except httpx.TimeoutException as error:
        raise UpstreamError(f"{engine} did not accept a connection in time ({type(error).__name__})", 504) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamError(f"{engine} broke the connection: {type(error).__name__} {error}".rstrip()) from error


async def _send(instance: Instance, path: str, body: bytes, headers: Headers) -> httpx.Response:
    """Once more over a new connection where a kept one was closed by the engine just before we used it."""
    opened = False

    async def trace(name: str, _: Any) -> None:
        nonlocal opened
        opened = opened or name == "connection.connect_tcp.started"

    url, timeout = instance.url + path, instance.timeout.as_dict()
    request = httpx.Request(
        "POST", url, content=body, headers=list(headers), extensions={"trace": trace, "timeout": timeout}
    )
    try:
        return await instance.transport.handle_async_request(request)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        if opened:
            raise
    again = httpx.Request(
        "POST", url, content=body, headers=[*headers, ("connection", "close")], extensions={"timeout": timeout}
    )
    return await instance.transport.handle_async_request(again)


async def _refusal(engine: str, response: httpx.Response) -> UpstreamError:
    status = response.status_code
    body = await response.aread()
    told = body[:200].decode(errors="replace").strip()
    if not 400 <= status < 600:
        return UpstreamError(f"{engine} answered HTTP {status}, which is no answer of this API")
    return UpstreamError(
        f"{engine} answered HTTP {status}: {told}".rstrip(": "),
        status,
        judged=status < 500 and status not in _ELSEWHERE,
        counts=status >= 500,
        body=body if body.lstrip()[:1] == b"{" else None,
    )

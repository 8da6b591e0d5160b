"""One call to an engine: which headers it gets, what its failures mean, and how much of its answer is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from layerflow.errors import UpstreamError
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.request import Headers

# RFC 9110 7.6.1, what is said for one connection only; and what the proxy decides itself.
_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
)
_FRAMING = frozenset(
    (b"transfer-encoding", b"upgrade", b"host", b"expect", b"content-length", b"content-type", b"content-encoding")
)
_OURS = _ONE_CONNECTION | _FRAMING | {b"trailer", b"accept-encoding", b"date", b"server"}
_CORS = b"access-control-"  # the proxy's own `allowed_origins` decide
_ELSEWHERE = (408, 425, 429)
"""Refusals that are about the engine's moment, not about the request: another engine may take it."""
_REFUSAL_BYTES = 1 << 20
"""Of an engine's error; a client gets a longer one in the proxy's words."""


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that go on to the other side, known to the proxy or not."""
    return [
        (name, value) for name, value in headers if name.lower() not in _OURS and not name.lower().startswith(_CORS)
    ]


def engine_headers(headers: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    """What an engine gets: the client's headers, under the leg's own request id."""
    kept = [(name, value) for name, value in passed_on(headers) if name.lower() != b"x-request-id"]
    return [
        *kept,
        (b"x-request-id", request_id.encode()),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]


@asynccontextmanager
async def post(
    instance: Instance, path: str, body: bytes, headers: Headers, idle_timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """The engine's answer, status 200, its body not read yet. Leaving closes it: the engine sees its client go.

    :param idle_timeout_s: between two pieces of an error's body.
    :raises UpstreamError: the engine cannot be reached, breaks off (also inside the block) or answers another status.
    """
    engine = instance.title
    try:
        response = await _send(instance, path, body, headers)
        try:
            if response.status_code != httpx.codes.OK:
                raise await _refusal(engine, response, idle_timeout_s)
            yield response
        finally:
            await response.aclose()
    except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
        # The client's headers: nothing was sent.
        raise UpstreamError(f"the request cannot be passed on: {error}", 400, judged=True, counts=False) from error
    except httpx.TimeoutException as error:
        raise UpstreamError(f"{engine} did not accept a connection in time ({type(error).__name__})", 504) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamError(f"{engine} broke the connection: {type(error).__name__} {error}".rstrip()) from error


async def read_answer(engine: str, response: httpx.Response, most: int, idle_timeout_s: float) -> bytes:
    """A whole body.

    :param engine: what messages call the engine.
    :raises UpstreamError: it has more than `most` bytes, or stops coming.
    """
    content = await _read(response, most, idle_timeout_s)
    if content is None:
        raise UpstreamError(f"{engine} sent a part of its answer, and then nothing for {idle_timeout_s:g} s", 504)
    if len(content) > most:
        raise UpstreamError(f"{engine} answered with more than {most} bytes (proxy.max_request_bytes)", counts=False)
    return bytes(content)


async def _read(response: httpx.Response, most: int, idle_timeout_s: float) -> bytearray | None:
    """The body, or its beginning if it has more than `most` bytes; None if it stops coming."""
    content = bytearray()
    with anyio.CancelScope(deadline=anyio.current_time() + idle_timeout_s) as patience:
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > most:
                break
            patience.deadline = anyio.current_time() + idle_timeout_s
    return None if patience.cancelled_caught else content


async def _send(instance: Instance, path: str, body: bytes, headers: Headers) -> httpx.Response:
    """Once more over a new connection where a kept one was closed by the engine just before we used it."""
    opened = False

    async def trace(name: str, _: Any) -> None:
        nonlocal opened
        opened = opened or name == "connection.connect_tcp.started"

    try:
        return await instance.ask("POST", path, body, headers, {"trace": trace})
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        if opened:
            raise
    return await instance.ask("POST", path, body, [*headers, (b"connection", b"close")])


async def _refusal(engine: str, response: httpx.Response, idle_timeout_s: float) -> UpstreamError:
    status = response.status_code
    body = await _read(response, _REFUSAL_BYTES, idle_timeout_s) or bytearray()
    told = bytes(body[:200]).decode(errors="replace").strip()
    if not 400 <= status < 600:
        return UpstreamError(f"{engine} answered HTTP {status}, which is no answer of this API")
    return UpstreamError(
        f"{engine} answered HTTP {status}: {told}".rstrip(": "),
        status,
        judged=status < 500 and status not in _ELSEWHERE,
        counts=status >= 500,
        body=bytes(body) if body.lstrip()[:1] == b"{" and len(body) <= _REFUSAL_BYTES else None,
    )

"""What a client gets: nothing until there is an answer, then that one answer, and a plain word if it breaks off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

import anyio
import msgspec

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.request import Headers
from layerflow.proxy.sse import Event, make_event

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_RETRY_AFTER_S = b"1"
_OK = 200


class ClientGone(Exception):
    """The client has closed its connection, or takes nothing any more."""


class Outlet(Protocol):
    """Where the answer to one prompt goes."""

    @property
    def begun(self) -> bool:
        """Whether the client has got a byte: from then on nothing is started again."""

    async def events(self, events: Sequence[Event], headers: Headers) -> None:
        """The next events of a stream; the first call begins the response.

        :param headers: the engine's, for the response.
        """

    async def whole(self, answer: dict[str, Any], headers: Headers) -> None:
        """The answer to a request that did not ask for a stream."""


class ClientResponse:
    """The HTTP response to one client.

    :param request_id: told in ``x-request-id``.
    :param patience_s: a client that takes no byte for so long counts as gone.
    """

    def __init__(self, send: Send, request_id: str, patience_s: float) -> None:
        self._send_message, self._request_id, self._patience_s = send, request_id, patience_s
        self.status = 0  #: 0 = not begun
        self._open = False

    @property
    def begun(self) -> bool:
        return self.status != 0

    async def events(self, events: Sequence[Event], headers: Headers) -> None:
        """:raises ClientGone: it takes nothing."""
        if not self.begun:
            self._open = True
            await self._begin(_OK, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers])
        await self._send({"type": "http.response.body", "body": b"".join(e.raw for e in events), "more_body": True})

    async def whole(self, answer: dict[str, Any], headers: Headers) -> None:
        """:raises ClientGone: it takes nothing."""
        await self.json(_OK, msgspec.json.encode(answer), headers)

    async def json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A response of JSON, at once. :raises ClientGone: it takes nothing."""
        length = str(len(body)).encode()
        await self._begin(status, [(b"content-type", b"application/json"), (b"content-length", length), *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ProxyError) -> None:
        """Say that the request has failed: by a status, or where the stream has begun, by an event that ends it.

        :raises ClientGone: it takes nothing.
        """
        body = error_body(error)
        if not self.begun:
            await self.json(error.status, body, [(b"retry-after", _RETRY_AFTER_S)] if error.status == 503 else [])
        elif self._open:
            await self.events([make_event(body)], [])

    async def end(self) -> None:
        """Close the stream, if there is one."""
        if self._open:
            self._open = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, status: int, headers: Headers) -> None:
        self.status = status
        told = [(name.lower(), value) for name, value in headers if name.lower() != b"x-request-id"]
        told.append((b"x-request-id", self._request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": told})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            with anyio.fail_after(self._patience_s):
                await self._send_message(message)
        except (OSError, TimeoutError) as error:
            self._open = False
            raise ClientGone(str(error)) from error


def error_body(error: ProxyError) -> bytes:
    """The JSON of an error in OpenAI's form; the engine's own where it sent one."""
    if isinstance(error, UpstreamError) and error.body is not None:
        return error.body.replace(b"\n", b" ").replace(b"\r", b" ")
    kind = "invalid_request_error" if error.status < 500 else "proxy_error"
    told = {"message": str(error), "type": kind, "param": None, "code": error.status}
    return msgspec.json.encode({"error": told})

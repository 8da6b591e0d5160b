"""What a client gets: nothing until there is an answer, then that one answer, and a plain word if it breaks off."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.context import BodyShare
from layerflow.proxy.request import Body, Headers

# Server-sent events out of a byte stream, whatever pieces the network cuts it into.
#
# https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end with LF, CR or CRLF; an empty line ends an
# event.


_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n|\n\r")
_LINE = re.compile(rb"\r\n|\n|\r")
DONE = b"[DONE]"


@dataclass(slots=True)
class Event:
    """One event.

    :param raw: its bytes as they came, the empty line included; what the client gets.
    :param data: its ``data`` lines joined by LF; None where it has none (a comment).
    """

    raw: bytes
    data: bytes | None


def make_event(data: bytes) -> Event:
    """An event of one ``data`` line."""
    return Event(b"data: " + data + b"\n\n", data)


class EventParser:
    """Feed it bytes, get the events that are complete.

    :param most: bytes that one event may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = bytearray()

    @property
    def unfinished(self) -> bytes:
        """What has come of an event whose end has not."""
        return bytes(self._buffer).strip(b"\r\n")

    def feed(self, received: bytes) -> list[Event]:
        """:raises UpstreamError: an event grows beyond `most`."""
        buffer = self._buffer
        # The end of an event may lie across the border: search from shortly before it.
        searched = max(0, len(buffer) - 3)
        buffer += received
        events: list[Event] = []
        began = 0
        while (found := _END.search(buffer, max(searched, began))) is not None:
            raw = bytes(buffer[began : found.end()])
            began = found.end()
            # A lone line end before it belongs to the event before, whose CRLF was cut in two.
            raw = raw.lstrip(b"\r\n")
            if raw:
                events.append(Event(raw, _data(raw)))
        del buffer[:began]
        if len(buffer) > self._most:
            raise UpstreamError(f"an event of the engine's stream has more than {self._most} bytes", counts=False)
        return events


def _data(raw: bytes) -> bytes | None:
    if raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return raw[6:-2]  # what engines send: one line
    lines = []
    for line in _LINE.split(raw):
        name, colon, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" ") if colon else b"")
    return b"\n".join(lines) if lines else None


Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_RETRY_AFTER_S = b"1"
_OK = 200
_WRITE_BYTES = 64 << 10
"""Of a whole answer, at once: so much of it may wait, uncounted, for a client that is slow to take it."""


class ClientGone(Exception):
    """The client has closed its connection, or takes nothing any more."""


class ResponseSink(Protocol):
    """Where the answer to one prompt goes."""

    @property
    def begun(self) -> bool:
        """Whether the client has got a byte of this answer: from then on it is not started again."""

    @property
    def room(self) -> BodyShare:
        """What the request keeps of the proxy's memory."""

    async def events(self, events: Sequence[Event], headers: Headers) -> None:
        """The next events of a stream; the first call begins the response.

        :param headers: the engine's, for the response.
        """

    async def whole(self, answer: Body, headers: Headers, kept: BodyShare) -> None:
        """The answer to a request that did not ask for a stream.

        :param kept: what the answer keeps of the proxy's memory.
        """


class ClientResponse:
    """The HTTP response to one client.

    :param request_id: told in ``x-request-id``.
    :param patience_s: a client that takes no byte for so long counts as gone.
    :param room: what the request keeps of the proxy's memory, until the response has ended.
    """

    def __init__(self, send: Send, request_id: str, patience_s: float, room: BodyShare) -> None:
        self._send_message, self._request_id, self._patience_s = send, request_id, patience_s
        self.room = room
        self.status = 0  #: 0 = not begun
        self.complete = False  #: its last byte was sent
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

    async def whole(self, answer: Body, headers: Headers, kept: BodyShare) -> None:
        """:raises ClientGone: it takes nothing."""
        pieces = answer.pieces()
        await self.json(_OK, sum(map(len, pieces)), pieces, headers)

    async def json(
        self, status: int, length: int, pieces: Iterable[bytes | msgspec.Raw], headers: Headers = ()
    ) -> None:
        """A response of JSON. A piece is asked for when the client has taken those before it, nearly.

        :param length: bytes of all pieces together.
        :raises ClientGone: it takes nothing.
        """
        told = [(b"content-type", b"application/json"), (b"content-length", str(length).encode()), *headers]
        await self._begin(status, told)
        for written in _cut(pieces):
            length -= len(written)
            await self._send({"type": "http.response.body", "body": written, "more_body": length > 0})
            if length > 0:
                await anyio.lowlevel.checkpoint()  # a client that takes all at once keeps nobody waiting
        self.complete = True

    async def fail(self, error: ProxyError) -> None:
        """Say that the request has failed: by a status, or where the stream has begun, by an event that ends it.

        :raises ClientGone: it takes nothing.
        """
        body = error_body(error)
        if not self.begun:
            headers = [(b"retry-after", _RETRY_AFTER_S)] if error.status == 503 else []
            await self.json(error.status, len(body), [body], headers)
        elif self._open:
            await self.events([make_event(body)], [])

    async def end(self) -> None:
        """Close the stream, if there is one."""
        if self._open:
            self._open = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self.complete = True

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


def _cut(pieces: Iterable[bytes | msgspec.Raw]) -> Iterator[bytes]:
    """The same bytes, so many at once as are written."""
    held = bytearray()
    for piece in pieces:
        view, place = memoryview(piece), 0
        while len(held) + len(view) - place > _WRITE_BYTES:
            end = place + _WRITE_BYTES - len(held)
            held += view[place:end]
            place = end
            yield bytes(held)
            held.clear()
        held += view[place:]
    yield bytes(held)


def error_body(error: ProxyError) -> bytes:
    """The JSON of an error in OpenAI's form; the engine's own where it sent one."""
    if isinstance(error, UpstreamError) and error.body is not None:
        return error.body.replace(b"\n", b" ").replace(b"\r", b" ")
    kind = "invalid_request_error" if error.status < 500 else "proxy_error"
    told = {"message": str(error), "type": kind, "param": None, "code": error.status}
    return msgspec.json.encode({"error": told})

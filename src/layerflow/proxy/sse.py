"""Server-sent events out of a byte stream, whatever pieces the network cuts it into.

https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end with LF, CR or CRLF; an empty line ends an
event.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerflow.errors import UpstreamError

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

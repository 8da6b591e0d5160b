"""What a backend with an index of its own holds, as the server is told of it.

The server's copy is exact because every report is sent in the order in which the changes are entered here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from layerflow.hosts.backend import Attached, Entry, Place
from layerflow.hosts.lane import Tell
from layerflow.hosts.messages import Gone, Held, Up, Written, pack_u32

PIECE = 4096
"""Entries of one message: some 130 KB."""


class Holding:
    """Says Up, and with an index everything that follows from it.

    :param tell: sends to the server.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._details: dict[str, Any] = {}
        self._entries: dict[bytes, Entry] | None = None
        self._gone_early: set[bytes] = set()
        self._attached = False

    def attach(self, attached: Attached) -> None:
        """The backend is connected for the first time."""
        with self._lock:
            self._details = dict(attached.details)
            if attached.index is not None:
                self._entries = {entry.key: entry for entry in attached.index if entry.key not in self._gone_early}
            self._attached = True
            self._say()

    def again(self) -> None:
        """It can be used again after it could not."""
        with self._lock:
            self._say()

    def gone(self, keys: Sequence[bytes]) -> None:
        """These have left the backend. Any thread."""
        with self._lock:
            if not self._attached:
                self._gone_early |= set(keys)
            elif self._entries is not None and keys:
                for key in keys:
                    self._entries.pop(key, None)
                self._tell(Gone(b"".join(keys)))

    def published(self, places: Sequence[Place], report: Written) -> None:
        """A write has ended and published these."""
        with self._lock:
            if self._entries is not None:
                for place in places:
                    self._entries[place.key] = Entry(place.key, place.blocks, place.tokens, place.parent)
            self._tell(report)

    def _say(self) -> None:
        self._tell(Up(self._details, self._entries is not None))
        if self._entries is None:
            return
        entries = list(self._entries.values())
        for at in range(0, max(1, len(entries)), PIECE):
            piece = entries[at : at + PIECE]
            self._tell(
                Held(
                    b"".join(entry.key for entry in piece),
                    pack_u32([entry.blocks for entry in piece]),
                    pack_u32([entry.tokens for entry in piece]),
                    tuple((position, entry.parent) for position, entry in enumerate(piece) if entry.parent),
                    at + PIECE >= len(entries),
                )
            )

"""The exporter's end of a windowed link: copies what was lent into the window, a few turns for each reader."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

from layerflow.errors import ProtocolError
from layerflow.hosts.peer.grants import ReadGrant
from layerflow.hosts.peer.link import Items, Lender, LentLink, LinkFailed
from layerflow.hosts.peer.streams import send
from layerflow.hosts.peer.windowed.plane import DataPlane, Window
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.peer_link import STAMP, pack_window

TURN_BYTES = 2 << 20
"""Read at once, its stamp included."""
TURNS = 4
"""Of one reader: one is read while the next ones are filled."""
SECTIONS = 64
"""Readers at once."""
SERVE_S = 3.0
"""For so long after it was last heard of a reader may be reading, in seconds."""
RESTART_S = 0.1
"""Before the library is served again after an error of its own."""
POLL_S = 2e-4
"""Between two looks at a library that has no thread of its own, while somebody may be reading."""


class WindowLender(Lender):
    """One window for all readers, in sections.

    :param plane: of that window; made here.
    """

    def __init__(self, arena: SharedMemory, host: str, plane: type[DataPlane]) -> None:
        self.arena = arena
        self.window = Window(SECTIONS * TURNS * TURN_BYTES)
        self._plane = plane(self.window, host)
        self.described = self._plane.describe()
        self._lock = threading.Condition()
        self._free = list(range(SECTIONS))[::-1]
        self._busy_until = 0.0
        if plane.serve is not DataPlane.serve:
            OwnedThread("layerflow-plane", self._serve, restart_s=RESTART_S).start()

    def open(self, incarnation: bytes) -> LentLink:
        with self._lock:
            if not self._free:
                raise LinkFailed(f"{SECTIONS} readers have all of the window")
            return _Section(self, self._free.pop(), incarnation)

    def free(self, section: int) -> None:
        """Its reader has gone."""
        with self._lock:
            self._free.append(section)

    def busy(self) -> None:
        """Somebody may read from now on."""
        with self._lock:
            self._busy_until = time.monotonic() + SERVE_S
            self._lock.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: time.monotonic() < self._busy_until)
            self._plane.serve()
            time.sleep(POLL_S)  # the library offers nothing to wait for


class _Section(LentLink):
    def __init__(self, lender: WindowLender, number: int, incarnation: bytes) -> None:
        self._lender, self._number, self._incarnation = lender, number, incarnation
        self._filled = 0
        self._start = number * TURNS * TURN_BYTES
        self._copied = memoryview(bytearray(TURN_BYTES))

    def introduce(self, connection: socket.socket) -> None:
        described = self._lender.described
        self._lender.busy()  # the library's own greeting
        send(connection, [pack_window(self._start, TURN_BYTES, TURNS, len(described)), described])

    def send(self, connection: socket.socket, grant: ReadGrant, heads: Sequence[bytes], items: Items, turn: int) -> int:
        total = sum(length for _, _, length in items)
        if turn >= TURNS or STAMP.size + total > TURN_BYTES:
            raise ProtocolError(f"turn {turn} with {total} bytes; there are {TURNS} of {TURN_BYTES}")
        arena, view = self._lender.arena, self._lender.window.view
        at = self._start + turn * TURN_BYTES
        STAMP.pack_into(view, at, self._incarnation, self._filled)
        self._filled += 1
        at, tails, done = at + STAMP.size, [], 0
        for item in items:
            position, start, length = item
            data = self._copied[done : done + length]
            if os.preadv(arena.fd, [data], grant.offsets[position] + start) != length:
                raise OSError(f"the arena ends before {length} bytes of object {position}")
            # Tagged where nobody else can write: whoever reaches the library's data plane may write to the window.
            tails.append(grant.tail(arena.read, item, grant.tag(item, data)))
            done += length
        view[at : at + done] = self._copied[:done]
        self._lender.busy()
        send(connection, [b"".join([*heads, *tails])])
        return total

    def close(self) -> None:
        self._lender.free(self._number)

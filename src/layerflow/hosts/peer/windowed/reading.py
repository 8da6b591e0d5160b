"""The importer's end of a windowed link: asks for turns, has the library read them, copies them into the arena."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import ObjectLocation, ObjectResult
from layerflow.hosts.peer.greeting import greeted
from layerflow.hosts.peer.link import STALL_S, LinkFailed, PeerLink, result_of
from layerflow.hosts.peer.streams import LinkClosed, LinkStalled, receive, send
from layerflow.hosts.peer.windowed.plane import DataPlane, Hanging, PlaneRead, Window
from layerflow.system.memfd import SharedMemory
from layerflow.wire.peer_link import HEAD, ITEM, READ, REQUEST, REQUEST_MAGIC, WINDOW, Origin, unpack_window

LEAST_BANDWIDTH = 1 << 20
"""Of a link that works, in bytes per second."""
MAX_HANGING = 8
"""Windows that reads which hang may still write: then the process ends, which ends them."""
HUNG = 1
"""Its exit code."""
_hanging: list[DataPlane] = []


class _Part(NamedTuple):
    """Of one object: which, first byte within it, bytes."""

    at: int
    start: int
    nbytes: int


class WindowedLink(PeerLink):
    """Connected, greeted, with a window of its own.

    :param until: when it must be, on the monotonic clock.
    :raises LinkFailed: nobody answers there, another exporter does, or the library does not reach it.
    :raises Unusable: the library does not work here.
    """

    def __init__(self, arena: SharedMemory, origin: Origin, until: float, plane: type[DataPlane]) -> None:
        self._arena = arena
        self._socket = greeted(origin, until)
        try:
            raw = bytearray(WINDOW.size)
            receive(self._socket, [memoryview(raw)], STALL_S, until)
            self._section, self._turn_bytes, self._turns, size = unpack_window(bytes(raw))
            described = bytearray(size)
            receive(self._socket, [memoryview(described)], STALL_S, until)
            self._window = Window(self._turns * self._turn_bytes)
            self._plane = plane(self._window, self._socket.getsockname()[0])
            self._plane.connect(bytes(described), self._socket.getpeername()[0])
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            self._socket.close()
            raise LinkFailed(str(error)) from None
        except BaseException:
            self._socket.close()
            raise

    def read(
        self, origin: Origin, places: Sequence[ObjectLocation], lo: int, hi: int, until: float
    ) -> list[ObjectResult]:
        statuses = [READ] * len(places)
        turns = list(_turns_of(places, lo, hi, self._turn_bytes))
        try:
            self._move(origin, places, turns, statuses, until)
        except Hanging:
            _hanging.append(self._plane)
            if len(_hanging) > MAX_HANGING:
                os._exit(HUNG)
            raise
        except (LinkClosed, LinkStalled, ProtocolError, OSError) as error:
            raise LinkFailed(str(error)) from None
        return [result_of(place, status) for place, status in zip(places, statuses, strict=True)]

    def _move(
        self,
        origin: Origin,
        places: Sequence[ObjectLocation],
        turns: list[list[_Part]],
        statuses: list[int],
        until: float,
    ) -> None:
        """One turn is read while the exporter fills the next one and the one before is copied into the arena."""
        for number, turn in enumerate(turns[: self._turns]):
            self._ask(origin, places, number, turn)
        last: tuple[int, list[_Part]] | None = None
        for number, turn in enumerate(turns):
            came = self._heads(places, turn, statuses, until)
            reading = self._begin(number, came)
            try:
                if last is not None:
                    self._land(places, *last)
            finally:
                if reading is not None:
                    nbytes = sum(part.nbytes for part in came)
                    reading.wait(min(until, time.monotonic() + STALL_S + nbytes / LEAST_BANDWIDTH))
            if number + self._turns < len(turns):
                self._ask(origin, places, number + self._turns, turns[number + self._turns])
            last = number, came
        # Whose window was it? The exporter's that was greeted, if that is alive now.
        send(self._socket, [REQUEST.pack(REQUEST_MAGIC, 0, origin.token, 0)])
        receive(self._socket, [memoryview(bytearray(HEAD.size))], STALL_S, until)
        if last is not None:
            self._land(places, *last)

    def _ask(self, origin: Origin, places: Sequence[ObjectLocation], number: int, turn: list[_Part]) -> None:
        head = REQUEST.pack(REQUEST_MAGIC, len(turn), origin.token, number % self._turns)
        send(self._socket, [head, *(ITEM.pack(places[at].position, 0, start, nbytes) for at, start, nbytes in turn)])

    def _heads(
        self, places: Sequence[ObjectLocation], turn: list[_Part], statuses: list[int], until: float
    ) -> list[_Part]:
        """What the exporter has put into a turn."""
        raw = bytearray(HEAD.size * len(turn))
        receive(self._socket, [memoryview(raw)], STALL_S, until)
        came = []
        for part, (position, status, nbytes) in zip(turn, HEAD.iter_unpack(raw), strict=True):
            if position != places[part.at].position or nbytes not in (0, part.nbytes):
                raise ProtocolError(f"object {position}, {nbytes} bytes; asked were {places[part.at].position} and "
                                    f"{part.nbytes}")  # fmt: skip
            if status != READ:
                statuses[part.at] = status
            if nbytes:
                came.append(part)
        return came

    def _begin(self, number: int, came: list[_Part]) -> PlaneRead | None:
        local = number % self._turns * self._turn_bytes
        nbytes = sum(part.nbytes for part in came)
        return self._plane.read(local, self._section + local, nbytes) if nbytes else None

    def _land(self, places: Sequence[ObjectLocation], number: int, came: list[_Part]) -> None:
        at = number % self._turns * self._turn_bytes
        for part in came:
            self._arena.write(places[part.at].offset + part.start, self._window.view[at : at + part.nbytes])
            at += part.nbytes

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        if self._plane not in _hanging:
            self._plane.close()


def _turns_of(places: Sequence[ObjectLocation], lo: int, hi: int, most: int) -> Iterator[list[_Part]]:
    """Layers `lo` to `hi` of these, in turns of at most so many bytes."""
    turn: list[_Part] = []
    room = most
    for at, place in enumerate(places):
        start, left = place.start(lo), (hi - lo) * place.layer_bytes
        while left:
            part = _Part(at, start, min(left, room))
            turn.append(part)
            start, left, room = start + part.nbytes, left - part.nbytes, room - part.nbytes
            if not room:
                yield turn
                turn, room = [], most
    if turn:
        yield turn

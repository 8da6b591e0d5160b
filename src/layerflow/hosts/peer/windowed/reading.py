"""The importer's end of a windowed link: asks for turns, has the library read them, copies them into the arena."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import ObjectLocation, ObjectResult
from layerflow.hosts.peer.greeting import greeted
from layerflow.hosts.peer.link import STALL_S, LinkFailed, PeerLink, result_of
from layerflow.hosts.peer.seal import RangeSeal
from layerflow.hosts.peer.streams import LEAST_BANDWIDTH, LinkClosed, LinkStalled, hung_up, receive, send
from layerflow.hosts.peer.windowed.plane import DataPlane, Hanging, PlaneRead, Window
from layerflow.system.memfd import SharedMemory
from layerflow.wire.peer_link import (
    ALTERED,
    HEAD,
    ITEM,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    STAMP,
    TAIL,
    WINDOW,
    Origin,
    unpack_window,
)

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


class _Pending(NamedTuple):
    """A turn that the library reads: its number, what is in it, with its tags."""

    number: int
    came: list[tuple[_Part, bytes]]
    reading: PlaneRead | None


class WindowedLink(PeerLink):
    """Connected, greeted, with a window of its own.

    :param until: when it must be, on the monotonic clock.
    :raises LinkFailed: nobody answers there, another exporter does, or the library does not reach it.
    :raises Unusable: the library does not work here.
    """

    def __init__(self, arena: SharedMemory, origin: Origin, until: float, plane: type[DataPlane]) -> None:
        self._arena = arena
        self._filled = 0
        self._socket = greeted(origin.address, origin.reader, origin.reader_key, until)
        try:
            raw = bytearray(WINDOW.size)
            receive(self._socket, [memoryview(raw)], STALL_S, until)
            self._section, self._turn_bytes, self._turns, size = unpack_window(bytes(raw))
            described = bytearray(size)
            receive(self._socket, [memoryview(described)], STALL_S, until)
            self._window = Window(self._turns * self._turn_bytes)
            self._copied = memoryview(bytearray(self._turn_bytes))
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
        turns = list(_turns_of(places, lo, hi, self._turn_bytes - STAMP.size))
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
        """One turn is copied into the arena while the library reads the next one and the exporter fills those after."""
        for number, turn in enumerate(turns[: self._turns]):
            self._ask(origin, places, number, turn)
        pending: deque[_Pending] = deque()
        seal = RangeSeal(origin.lease_key, origin.token)

        def finish() -> None:
            number, came, reading = pending[0]
            if reading is not None:
                reading.wait(min(until, time.monotonic() + STALL_S + self._turn_bytes / LEAST_BANDWIDTH))
                pending.popleft()
                self._check(number, origin.incarnation)
                self._land(seal, places, number, came, statuses)
            else:
                pending.popleft()
            if number + self._turns < len(turns):
                self._ask(origin, places, number + self._turns, turns[number + self._turns])

        try:
            for number, turn in enumerate(turns):
                came = self._heads(places, turn, statuses, until)
                pending.append(_Pending(number, came, self._begin(number, came)))
                if len(pending) > 1:
                    finish()
            while pending:
                finish()
        except Hanging:
            raise
        except BaseException:
            self._end(pending)
            raise

    def _end(self, pending: Iterable[_Pending]) -> None:
        """Of a link that has failed: nothing may be under way when its window goes.

        :raises Hanging: something is.
        """
        until = time.monotonic() + STALL_S
        for each in pending:
            if each.reading is not None:
                try:
                    each.reading.wait(until)
                except Hanging:
                    raise
                except LinkFailed:
                    continue

    def _ask(self, origin: Origin, places: Sequence[ObjectLocation], number: int, turn: list[_Part]) -> None:
        head = REQUEST.pack(REQUEST_MAGIC, len(turn), origin.token, number % self._turns)
        send(self._socket, [head, *(ITEM.pack(places[at].position, 0, start, nbytes) for at, start, nbytes in turn)])

    def _heads(
        self, places: Sequence[ObjectLocation], turn: list[_Part], statuses: list[int], until: float
    ) -> list[tuple[_Part, bytes]]:
        """What the exporter has put into a turn, with the tags of what counts."""
        raw = bytearray(HEAD.size * len(turn))
        receive(self._socket, [memoryview(raw)], STALL_S, until)
        came = []
        for part, (position, status, nbytes) in zip(turn, HEAD.iter_unpack(raw), strict=True):
            if position != places[part.at].position or nbytes != (part.nbytes if status == READ else 0):
                raise ProtocolError(f"object {position}, {nbytes} bytes; asked were {places[part.at].position} and "
                                    f"{part.nbytes}")  # fmt: skip
            if status == READ:
                came.append(part)
            else:
                statuses[part.at] = status
        tails = bytearray(TAIL.size * len(came))
        receive(self._socket, [memoryview(tails)], STALL_S, until)
        tagged = []
        for part, (position, status, tag) in zip(came, TAIL.iter_unpack(tails), strict=True):
            if position != places[part.at].position:
                raise ProtocolError(f"the tail of object {position} came, not that of {places[part.at].position}")
            if status != READ:
                statuses[part.at] = status
            tagged.append((part, tag))
        return tagged

    def _begin(self, number: int, came: list[tuple[_Part, bytes]]) -> PlaneRead | None:
        local = number % self._turns * self._turn_bytes
        nbytes = sum(part.nbytes for part, _ in came)
        return self._plane.read(local, self._section + local, STAMP.size + nbytes) if nbytes else None

    def _check(self, number: int, incarnation: bytes) -> None:
        """Whose window was it, and is it what was asked for?

        :raises ProtocolError: it is not.
        """
        found, filled = STAMP.unpack_from(self._window.view, number % self._turns * self._turn_bytes)
        if found != incarnation or filled != self._filled:
            raise ProtocolError("the library has read another window than that of the exporter that was asked")
        self._filled += 1

    def _land(
        self,
        seal: RangeSeal,
        places: Sequence[ObjectLocation],
        number: int,
        came: list[tuple[_Part, bytes]],
        statuses: list[int],
    ) -> None:
        """Copy what a turn brought into the arena, as far as it counts and its tags fit."""
        at = number % self._turns * self._turn_bytes + STAMP.size
        for part, tag in came:
            place, data = places[part.at], self._copied[: part.nbytes]
            # Copied first: what lies in the window may change under the library's hands, and under a stranger's.
            data[:] = self._window.view[at : at + part.nbytes]
            at += part.nbytes
            if statuses[part.at] != READ:
                continue
            if seal.fits(tag, place.key, part.start, data):
                self._arena.write(place.offset + part.start, data)
            else:
                statuses[part.at] = ALTERED

    @property
    def closed(self) -> bool:
        return hung_up(self._socket)

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

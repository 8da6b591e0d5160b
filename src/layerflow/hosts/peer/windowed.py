"""Links over somebody else's transfer library, which never sees an arena: bytes pass through registered windows."""

from __future__ import annotations

import abc
import contextlib
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import ObjectLocation, ObjectResult, Unusable
from layerflow.hosts.peer.grants import RangeSeal, ReadGrant
from layerflow.hosts.peer.link import (
    LEAST_BANDWIDTH,
    STALL_S,
    Items,
    Lender,
    LentLink,
    LinkClosed,
    LinkFailed,
    LinkStalled,
    PeerLink,
    greeted,
    hung_up,
    receive,
    result_of,
    send,
)
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
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
    pack_window,
    unpack_window,
)

__all__ = ["LinkFailed", "PlaneRead", "ReadTimedOut", "TransferLibrary", "Unusable", "Window"]


class ReadTimedOut(LinkFailed):
    """A read has not ended in time. The library cannot take it back: its window must not be used again."""


class Window:
    """Memory of this process that a library may be shown. Its pages are taken when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self.view = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)


class PlaneRead(abc.ABC):
    """One read that is under way."""

    @abc.abstractmethod
    def wait(self, until: float) -> None:
        """Until its bytes are in the window; `until` is on the monotonic clock.

        :raises Hanging: they are not by then.
        :raises LinkFailed: they will not come, and nothing of it is written any more.
        """


class TransferLibrary(abc.ABC):
    """One library, registered with one window. Made in a host process; making it may take a second.

    :param window: all that is registered.
    :param host: the address of this machine that its peers use; "" = any.
    :raises Unusable: the library is missing or does not work here.
    """

    @classmethod
    @abc.abstractmethod
    def load(cls) -> None:
        """Import the library, ahead of the first window.

        :raises Unusable: it is missing.
        """

    @abc.abstractmethod
    def __init__(self, window: Window, host: str) -> None: ...

    @abc.abstractmethod
    def describe(self) -> bytes:
        """What a reader needs to read from this window; at most 64 KiB."""

    @abc.abstractmethod
    def connect(self, described: bytes, host: str) -> None:
        """Reader's end, once: whose window is read, and at which address that machine is.

        :raises LinkFailed: it cannot be reached.
        """

    @abc.abstractmethod
    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        """Begin to read so many bytes at `remote` in the peer's window to `local` in this one.

        :raises LinkFailed: it cannot.
        """

    def serve(self) -> None:  # noqa: B027 - most have threads of their own
        """Lender's end: let the library work for its readers, and return; called over and over while they may read."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is under way: leave. Never raises."""


# The exporter's end of a windowed link: copies what was lent into the window, a few turns for each reader.


TURN_BYTES = 2 << 20
"""Read at once, its stamp included."""
TURNS = 4
"""Of one reader: one is read while the next ones are filled."""
SECTIONS = 64
"""Readers at once."""
FREE_S = 1.5
"""How long a new reader waits for the section of one that was hung up on: longer than that one's request may wait
(``LEND_S``), shorter than the new one's patience (``STALL_S``)."""
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

    most = SECTIONS

    def __init__(self, arena: SharedMemory, host: str, plane: type[TransferLibrary]) -> None:
        self.arena = arena
        self.window = Window(SECTIONS * TURNS * TURN_BYTES)
        self._plane = plane(self.window, host)
        self.described = self._plane.describe()
        self._lock = threading.Condition()
        self._free = list(range(SECTIONS))[::-1]
        self._busy_until = 0.0
        if plane.serve is not TransferLibrary.serve:
            OwnedThread("layerflow-plane", self._serve, restart_s=RESTART_S).start()

    def open(self, incarnation: bytes) -> LentLink:
        with self._lock:
            if not self._lock.wait_for(lambda: self._free, FREE_S):
                raise LinkFailed(f"{SECTIONS} readers have all of the window")
            return _Section(self, self._free.pop(), incarnation)

    def free(self, section: int) -> None:
        """Free a section whose reader has gone."""
        with self._lock:
            self._free.append(section)
            self._lock.notify_all()

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
            if os.preadv(arena.fd, [data], grant.objects[position].offset + start) != length:
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


# The importer's end of a windowed link: asks for turns, has the library read them, copies them into the arena.


MAX_HANGING = 8
"""Windows that reads which hang may still write: then the process ends, which ends them."""
HUNG = 1
"""Its exit code."""
_hanging: list[TransferLibrary] = []


class _ObjectPart(NamedTuple):
    """A part of one object: which, first byte within it, bytes."""

    at: int
    start: int
    nbytes: int


class _PendingRead(NamedTuple):
    """A turn that the library reads: its number, what is in it, with its tags."""

    number: int
    came: list[tuple[_ObjectPart, bytes]]
    reading: PlaneRead | None


class WindowedLink(PeerLink):
    """Connected, greeted, with a window of its own.

    :param until: when it must be, on the monotonic clock.
    :raises LinkFailed: nobody answers there, another exporter does, or the library does not reach it.
    :raises Unusable: the library does not work here.
    """

    def __init__(self, arena: SharedMemory, origin: Origin, until: float, plane: type[TransferLibrary]) -> None:
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
            try:
                self._plane.connect(bytes(described), self._socket.getpeername()[0])
            except BaseException:
                self._plane.close()  # before its window goes, which is registered
                raise
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
        except ReadTimedOut:
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
        turns: list[list[_ObjectPart]],
        statuses: list[int],
        until: float,
    ) -> None:
        """One turn is copied into the arena while the library reads the next one and the exporter fills those after."""
        for number, turn in enumerate(turns[: self._turns]):
            self._ask(origin, places, number, turn)
        pending: deque[_PendingRead] = deque()
        seal = RangeSeal(origin.lease_key, origin.token)

        def finish() -> None:
            number, came, reading = pending[0]
            if reading is not None:
                reading.wait(min(until, time.monotonic() + STALL_S + self._turn_bytes / LEAST_BANDWIDTH))
                pending.popleft()
                self._check(number, origin.incarnation)
                self._copy_in(seal, places, number, came, statuses)
            else:
                pending.popleft()
            if number + self._turns < len(turns):
                self._ask(origin, places, number + self._turns, turns[number + self._turns])

        try:
            for number, turn in enumerate(turns):
                came = self._heads(places, turn, statuses, until)
                pending.append(_PendingRead(number, came, self._begin(number, came)))
                if len(pending) > 1:
                    finish()
            while pending:
                finish()
        except ReadTimedOut:
            raise
        except BaseException:
            self._end(pending)
            raise

    def _end(self, pending: Iterable[_PendingRead]) -> None:
        """End a link that has failed: nothing may be under way when its window goes.

        :raises Hanging: something is.
        """
        until = time.monotonic() + STALL_S
        for each in pending:
            if each.reading is not None:
                try:
                    each.reading.wait(until)
                except ReadTimedOut:
                    raise
                except LinkFailed:
                    continue

    def _ask(self, origin: Origin, places: Sequence[ObjectLocation], number: int, turn: list[_ObjectPart]) -> None:
        head = REQUEST.pack(REQUEST_MAGIC, len(turn), origin.token, number % self._turns)
        send(self._socket, [head, *(ITEM.pack(places[at].position, 0, start, nbytes) for at, start, nbytes in turn)])

    def _heads(
        self, places: Sequence[ObjectLocation], turn: list[_ObjectPart], statuses: list[int], until: float
    ) -> list[tuple[_ObjectPart, bytes]]:
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

    def _begin(self, number: int, came: list[tuple[_ObjectPart, bytes]]) -> PlaneRead | None:
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

    def _copy_in(
        self,
        seal: RangeSeal,
        places: Sequence[ObjectLocation],
        number: int,
        came: list[tuple[_ObjectPart, bytes]],
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


def _turns_of(places: Sequence[ObjectLocation], lo: int, hi: int, most: int) -> Iterator[list[_ObjectPart]]:
    """Layers `lo` to `hi` of these, in turns of at most so many bytes."""
    turn: list[_ObjectPart] = []
    room = most
    for at, place in enumerate(places):
        start, left = place.start(lo), (hi - lo) * place.layer_bytes
        while left:
            part = _ObjectPart(at, start, min(left, room))
            turn.append(part)
            start, left, room = start + part.nbytes, left - part.nbytes, room - part.nbytes
            if not room:
                yield turn
                turn, room = [], most
    if turn:
        yield turn

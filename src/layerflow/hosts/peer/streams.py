"""Whole frames over blocking sockets."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

_TIMEVAL = struct.Struct("@ll")


class LinkClosed(Exception):
    """The connection has ended, or is to."""


class LinkStalled(Exception):
    """Nothing came, or was taken, for too long."""


SEND_STALL_S = 5.0
"""How long the other end may take nothing of what is sent."""
LEAST_BANDWIDTH = 1 << 20
"""Bytes per second of a link that is any good: who takes a few at a time keeps no thread."""
MAX_BUFFERS = 1024
"""That one call of the kernel fills (IOV_MAX)."""


def set_timeout(connection: socket.socket, seconds: float | None) -> None:
    """How long one receive may wait."""
    _limit(connection, socket.SO_RCVTIMEO, 0.0 if seconds is None else max(seconds, 1e-3))


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    """By the kernel: a socket of Python's with a time-out polls before each call. 0 = without a limit."""
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def hung_up(connection: socket.socket) -> bool:
    """Has the other end hung up, or said what nobody has asked for? Neither leaves a connection to go on with."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def receive(
    connection: socket.socket, room: Sequence[memoryview], stall_s: float | None, until: float | None = None
) -> None:
    """Fill all of `room`, one after the other.

    :param stall_s: how long nothing may come. :param until: when it must have come, on the monotonic clock.
    :raises LinkClosed: the other end has hung up.
    :raises LinkStalled: too slow.
    :raises OSError: the connection is broken.
    """
    set_timeout(connection, stall_s)
    left = deque(part for part in room if part.nbytes)
    while left:
        try:
            got = connection.recvmsg_into(list(islice(left, MAX_BUFFERS)), 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise LinkStalled(f"nothing came for {stall_s:g} s") from None
        if not got:
            raise LinkClosed("the other end has hung up")
        while left and got >= left[0].nbytes:
            got -= left.popleft().nbytes
        if got:
            left[0] = left[0][got:]
        if left and until is not None and time.monotonic() >= until:
            raise LinkStalled(f"{sum(part.nbytes for part in left)} bytes have not come in the time there was")


def send(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """All of it, in one call where the kernel takes it.

    :raises LinkClosed: the other end has hung up.
    :raises LinkStalled: it takes nothing, or too little.
    """
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    until = time.monotonic() + SEND_STALL_S + sum(part.nbytes for part in left) / LEAST_BANDWIDTH
    _limit(connection, socket.SO_SNDTIMEO, SEND_STALL_S)
    try:
        while left:
            sent = connection.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]
            if left and time.monotonic() >= until:
                raise LinkStalled(f"{sum(part.nbytes for part in left)} bytes were not taken in the time there was")
    except BlockingIOError:
        raise LinkStalled(f"nothing was taken for {SEND_STALL_S:g} s") from None
    except (BrokenPipeError, ConnectionResetError):
        raise LinkClosed("the other end has hung up") from None

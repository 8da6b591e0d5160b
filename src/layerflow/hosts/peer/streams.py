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
    """Nothing came for too long."""


MAX_BUFFERS = 1024
"""That one call of the kernel fills (IOV_MAX)."""


def set_timeout(connection: socket.socket, seconds: float | None) -> None:
    """How long one receive may wait, by the kernel: a socket of Python's with a time-out polls before each call."""
    whole = 0.0 if seconds is None else max(seconds, 1e-3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(whole), int(whole % 1 * 1e6)))


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
    """
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    try:
        while left:
            sent = connection.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]
    except (BrokenPipeError, ConnectionResetError):
        raise LinkClosed("the other end has hung up") from None

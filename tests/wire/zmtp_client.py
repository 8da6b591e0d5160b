"""ZMTP as its page on rfc.zeromq.org has it, by hand: what a raw client sends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 20.0
MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes = b"NULL") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def frame(content: bytes, flags: int = 0) -> bytes:
    if len(content) < 256:
        return bytes((flags, len(content))) + content
    return struct.pack(">BQ", flags | LONG, len(content)) + content


def ready(kind: bytes = b"DEALER") -> bytes:
    name = b"Socket-Type"
    return frame(b"\x05READY" + bytes((len(name),)) + name + struct.pack(">I", len(kind)) + kind, COMMAND)


@contextmanager
def raw_client(path: Path | str, kind: bytes = b"DEALER") -> Iterator[socket.socket]:
    """Connected and through the handshake; nothing is read but that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(path))
        client.sendall(greeting() + ready(kind))
        told = b""
        while len(told) < 64 + 2 or len(told) < 66 + told[65]:
            told += client.recv(1)
        yield client


def hung_up(client: socket.socket) -> bool:
    """Has the server ended this connection, within :data:`PATIENCE_S`?"""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True

"""The host's main thread, in this process: what it hears."""

from __future__ import annotations

import fcntl
import resource
import socket
import time

from layerflow.hosts.process import HostMain
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Ping, encode

PAST_SELECT = 1024
"""Descriptors from here on are none to select(); an engine that starts a host has such ones."""


def test_a_connection_of_any_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    arena = SharedMemory.create(4096)
    server, host = socket.socketpair()
    try:
        with server, host, socket.socket(fileno=fcntl.fcntl(host, fcntl.F_DUPFD_CLOEXEC, PAST_SELECT)) as high:
            runner = HostMain(high, arena)
            assert runner._hear(time.monotonic() + 0.01) is None
            server.sendall(encode(Ping(7)))
            assert runner._hear(time.monotonic() + 20) == Ping(7)
    finally:
        arena.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

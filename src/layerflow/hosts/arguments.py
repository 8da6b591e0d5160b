"""What every host process does first: reads what its server gave it, and sees to it that it ends with its server."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys

from layerflow.observe import logs
from layerflow.system.memfd import SharedMemory

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def connect(program: str, description: str, *, writable: bool = True) -> tuple[socket.socket, SharedMemory]:
    """The connection to the server, and its arena.

    :param writable: the host writes to the arena.
    """
    arguments = argparse.ArgumentParser(prog=program, description=description)
    arguments.add_argument("--socket", type=int, required=True, help="descriptor of the connection to the server")
    arguments.add_argument("--arena", type=int, required=True, help="descriptor of the arena")
    arguments.add_argument("--arena-bytes", type=int, required=True)
    arguments.add_argument("--unmapped", action="store_true", help="do not map the arena")
    arguments.add_argument("--parent", type=int, required=True, help="process id of the server")
    given = arguments.parse_args()
    _default_signals()
    _die_with(given.parent)
    faulthandler.enable()
    logs.configure("info", "json", sys.stderr)
    arena = SharedMemory.attach(given.arena, given.arena_bytes, writable=writable, mapped=not given.unmapped)
    os.close(given.arena)
    return socket.socket(fileno=given.socket), arena


def _default_signals() -> None:
    """Whatever the server's process (an engine, where it is embedded) blocks or ignores is inherited."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, even inside a call that hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(0)

"""Mooncake's TransferEngine over TCP, without a metadata service."""

from __future__ import annotations

import importlib
import os
import queue
import struct
import threading
import time
from typing import Any

from layerflow.hosts.peer.link import STALL_S, Lender, LinkFailed, PeerLink
from layerflow.hosts.peer.windowed import (
    RESTART_S,
    PlaneRead,
    ReadTimedOut,
    TransferLibrary,
    Unusable,
    Window,
    WindowedLink,
    WindowLender,
)
from layerflow.links import LinkPlugin
from layerflow.system.memfd import SharedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.peer_link import Origin

LINK = LinkPlugin(
    reader=f"{__name__}:reader",
    lender=f"{__name__}:lender",
    plane=f"{__name__}:MooncakePlane",
    maps_arena=False,
    trusts_network=True,
    package="mooncake-transfer-engine-non-cuda",
    version="0.3.13",
    library="mooncake",
    probe="mooncake.engine",
)
TIMEOUT_S = 5
"""After which the library gives a transfer up; it takes no less."""
_engine: Any = None
"""One for each process, with its dozen threads; its windows come and go."""


def reader(arena: SharedMemory, origin: Origin, until: float) -> PeerLink:
    """:raises LinkFailed: nobody answers there. :raises Unusable: there is no Mooncake."""
    return WindowedLink(arena, origin, until, MooncakePlane)


def lender(arena: SharedMemory, host: str) -> Lender:
    """:raises Unusable: there is no Mooncake."""
    return WindowLender(arena, host, MooncakePlane)


class MooncakePlane(TransferLibrary):
    """A registered window. The engine checks each address that a peer reads or writes against it."""

    def __init__(self, window: Window, host: str) -> None:
        self._window, self._engine = window, _made(host)
        code = self._engine.register_memory(window.address, window.nbytes)
        if code:
            raise Unusable(f"Mooncake does not register {window.nbytes} bytes: code {code}")
        self._port = int(self._engine.get_rpc_port())
        self._remote, self._session = 0, ""
        self._waiter: _ReadThread | None = None

    @classmethod
    def load(cls) -> None:
        _imported()

    def describe(self) -> bytes:
        return struct.pack("<QH", self._window.address, self._port)

    def connect(self, described: bytes, host: str) -> None:
        self._remote, port = struct.unpack("<QH", described)
        self._session = f"{host}:{port}"

    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        mine, theirs = self._window.address + local, self._remote + remote
        batch = int(self._engine.batch_transfer_async_read(self._session, [mine], [theirs], [nbytes]))
        if not batch:
            raise LinkFailed(f"Mooncake cannot reach {self._session}")
        read = _MooncakeRead(batch, self._session)
        if self._waiter is None:
            self._waiter = _ReadThread(self._engine)
        self._waiter.put(read)
        return read

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.put(None)
        self._engine.unregister_memory(self._window.address)


class _ReadThread:
    """A thread that waits for reads of one plane, in order: the library's call does nothing else, for up to 5 s."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._reads: queue.SimpleQueue[_MooncakeRead | None] = queue.SimpleQueue()
        OwnedThread("layerflow-mooncake", self._run, restart_s=RESTART_S).start()

    def put(self, read: _MooncakeRead | None) -> None:
        """None = no more."""
        self._reads.put(read)

    def _run(self) -> None:
        while (read := self._reads.get()) is not None:
            read.ended(int(self._engine.get_batch_transfer_status([read.batch])))


class _MooncakeRead(PlaneRead):
    """:param batch: as the library numbers it. It is asked for once: a second time crashes the process."""

    def __init__(self, batch: int, session: str) -> None:
        self.batch, self._session = batch, session
        self._code = 0
        self._began, self._done = time.monotonic(), threading.Event()

    def ended(self, code: int) -> None:
        """By the waiter."""
        self._code = code
        self._done.set()

    def wait(self, until: float) -> None:
        done = self._done.wait(max(0.0, until - time.monotonic()))
        # After a time-out of its own the library goes on writing.
        if not done or (self._code and time.monotonic() - self._began > TIMEOUT_S - 1):
            raise ReadTimedOut(f"nothing came over Mooncake from {self._session} for {STALL_S:g} s")
        if self._code:
            raise LinkFailed(f"Mooncake cannot read from {self._session}: code {self._code}")


def _made(host: str) -> Any:
    global _engine  # noqa: PLW0603
    if not host:
        raise Unusable("Mooncake has to know by which address it is reached: set peers.link_address or link_advertise")
    if _engine is None:
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(TIMEOUT_S))
        engine = _imported().TransferEngine()
        if code := engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise Unusable(f"Mooncake's transfer engine does not start: code {code}")
        _engine = engine
    return _engine


def _imported() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise Unusable(
            f"Mooncake cannot be imported ({error}): pip install {LINK.package} and libibverbs on both sides"
        ) from error

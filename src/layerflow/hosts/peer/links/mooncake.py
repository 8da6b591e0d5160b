"""Mooncake's TransferEngine over TCP, without a metadata service."""

from __future__ import annotations

import importlib
import os
import struct
import threading
import time
from typing import Any

from layerflow.hosts.peer.link import STALL_S, Lender, LinkFailed, PeerLink
from layerflow.hosts.peer.windowed.lending import WindowLender
from layerflow.hosts.peer.windowed.plane import DataPlane, Hanging, PlaneRead, Unusable, Window
from layerflow.hosts.peer.windowed.reading import WindowedLink
from layerflow.links import LinkPlugin
from layerflow.system.memfd import SharedMemory
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


class MooncakePlane(DataPlane):
    """A registered window. The engine checks each address that a peer reads or writes against it."""

    def __init__(self, window: Window, host: str) -> None:
        self._window, self._engine = window, _made(host)
        code = self._engine.register_memory(window.address, window.nbytes)
        if code:
            raise Unusable(f"Mooncake does not register {window.nbytes} bytes: code {code}")
        self._port = int(self._engine.get_rpc_port())
        self._remote, self._session = 0, ""

    @classmethod
    def load(cls) -> None:
        _imported()

    def describe(self) -> bytes:
        return struct.pack("<QH", self._window.address, self._port)

    def connect(self, described: bytes, host: str) -> None:
        self._remote, port = struct.unpack("<QH", described)
        self._session = f"{host}:{port}"

    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        return _Read(self._engine, self._session, self._window.address + local, self._remote + remote, nbytes)

    def close(self) -> None:
        self._engine.unregister_memory(self._window.address)


class _Read(PlaneRead):
    """On a thread: the library's calls wait."""

    def __init__(self, engine: Any, session: str, local: int, remote: int, nbytes: int) -> None:
        self._code: int | None = None
        self._session = session

        def read() -> None:
            self._code = engine.transfer_sync_read(session, local, remote, nbytes)

        self._thread = threading.Thread(target=read, name="layerflow-mooncake", daemon=True)
        self._thread.start()

    def wait(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._code is None:
            raise Hanging(f"nothing came over Mooncake from {self._session} for {STALL_S:g} s")
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

"""NIXL's agent with its UCX backend, over TCP and, on one machine, shared memory.

The library has no thread of its own here: one would spin on a core for as long as the process lives. The reader polls
while it reads, and the lender while somebody may be reading.
"""

from __future__ import annotations

import fcntl
import importlib
import ipaddress
import os
import secrets
import socket
import struct
import time
from typing import Any

from layerflow.hosts.lanes import describe
from layerflow.hosts.peer.link import STALL_S, Lender, LinkFailed, PeerLink
from layerflow.hosts.peer.windowed import (
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
from layerflow.wire.peer_link import Origin

LINK = LinkPlugin(
    reader=f"{__name__}:reader",
    lender=f"{__name__}:lender",
    plane=f"{__name__}:NixlTransfer",
    maps_arena=False,
    trusts_network=True,
    package="nixl",
    version="1.5",
    library="nixl",
    probe="nixl._api",
)
TRANSPORTS = "tcp,sm,self"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
POLL_S, MAX_POLL_S = 2e-5, 2e-4


def reader(arena: SharedMemory, origin: Origin, until: float) -> PeerLink:
    """:raises LinkFailed: nobody answers there. :raises Unusable: there is no NIXL."""
    return WindowedLink(arena, origin, until, NixlTransfer)


def lender(arena: SharedMemory, host: str) -> Lender:
    """:raises Unusable: there is no NIXL."""
    return WindowLender(arena, host, NixlTransfer)


class NixlTransfer(TransferLibrary):
    """An agent with one registered window."""

    def __init__(self, window: Window, host: str) -> None:
        # Only what goes through this process's page tables: it is what was tried. UCX's own variables win.
        os.environ.setdefault("UCX_TLS", TRANSPORTS)
        device = device_of(host)
        if device:
            os.environ.setdefault("UCX_NET_DEVICES", device)
        api = _imported()
        self._window, self._peer = window, ""
        try:
            options = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(f"layerflow-{secrets.token_hex(8)}", options)
            self._registered = self._agent.register_memory([(window.address, window.nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise Unusable(f"NIXL's UCX backend does not start: {describe(error)}") from error

    @classmethod
    def load(cls) -> None:
        _imported()

    def describe(self) -> bytes:
        return self._window.address.to_bytes(8, "little") + bytes(self._agent.get_agent_metadata())

    def connect(self, described: bytes, host: str) -> None:
        self._remote = int.from_bytes(described[:8], "little")
        try:
            self._peer = self._agent.add_remote_agent(described[8:])
        except Exception as error:  # noqa: BLE001
            raise LinkFailed(f"NIXL does not reach the peer: {describe(error)}") from None

    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        agent = self._agent
        try:
            mine = agent.get_xfer_descs([(self._window.address + local, nbytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(self._remote + remote, nbytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", mine, theirs, self._peer)
            return _NixlRead(agent, handle, agent.transfer(handle))
        except Exception as error:  # noqa: BLE001
            raise LinkFailed(f"NIXL refuses to read: {describe(error)}") from None

    def serve(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        try:
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            self._agent.deregister_memory(self._registered)
        except Exception:  # noqa: BLE001 - the peer is gone: the agent goes with its last reference
            self._registered = None
        self._agent = None


def _imported() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise Unusable(f"NIXL cannot be imported ({error}): pip install nixl on both sides") from error


class _NixlRead(PlaneRead):
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def wait(self, until: float) -> None:
        delay = POLL_S
        try:
            while self._state == "PROC":
                if time.monotonic() >= until:
                    raise ReadTimedOut(f"nothing came over NIXL for {STALL_S:g} s")
                time.sleep(delay)  # the library offers nothing to wait for
                delay = min(1.5 * delay, MAX_POLL_S)
                self._state = self._agent.check_xfer_state(self._handle)
        except LinkFailed:
            raise
        except Exception as error:  # noqa: BLE001
            raise LinkFailed(f"NIXL lost the peer: {describe(error)}") from None
        if self._state != "DONE":
            raise LinkFailed(f"NIXL ended the read with {self._state}")
        self._agent.release_xfer_handle(self._handle)


def device_of(host: str) -> str:
    """The network device that has this IPv4 address; "" = none has, or any will do."""
    try:
        wanted = ipaddress.IPv4Address(host)
    except ValueError:
        return ""
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            if ipaddress.IPv4Address(answer[20:24]) == wanted:
                return name
    return ""

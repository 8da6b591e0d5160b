"""The agent's own client of the pool: one per process, from the options in the server's Welcome.

The library keeps one client per process whatever is made of it, its close takes seconds with the GIL held, and a
process that ends without it aborts. So it is made once, and closed with the agent or at exit.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import structlog

from layerflow.device.base import Device
from layerflow.hosts.backend import Unreachable, Unusable
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.setup import MemcacheConnection, MemcacheOptions, connect, shared

JOINS = 3

log = structlog.get_logger("layerflow.agent")

_taken = threading.Lock()


def suits(device: Device) -> bool:
    """Can the pool's client reach this device's memory?"""
    return device.kind == "npu"


@dataclass(frozen=True, slots=True)
class StoreClient:
    """A client that is connected; the process's only one until :func:`give_back`.

    :param store: ``memcache_hybrid.DistributedObjectStore``.
    :param number: its rank in the pool, which no other live client has.
    :param world_size: most clients of the pool.
    :param options: what it was made from, as the server sent them.
    """

    store: Any
    meta: MetaService
    number: int
    world_size: int
    options: str


def open_client(options: str, device_id: int) -> StoreClient:
    """Connect. Blocks, for seconds at times.

    :param options: JSON, of ``[pool.memcache]``; the memory it gives and its address are the server's host's.
    :param device_id: number of this worker's device.
    :raises Unreachable: the MetaService does not answer, or does not let it in now.
    :raises Unusable: the package or what it needs is missing, or another agent of this process has the client.
    """
    if not _taken.acquire(blocking=False):
        raise Unusable("another agent of this process has the pool's client; run one engine worker in a process")
    try:
        said = MemcacheOptions.read(json.loads(options))
        # What an engine gave to the pool would go with it.
        mine = {"dram_size": 0, "device_id": device_id, "hcom_url": _own_address(said.hcom_url)}
        read = MemcacheOptions.read(json.loads(options) | mine)
        common = shared(read)
        meta = MetaService(common.meta_service_url, common.metrics_url)
        connected = _connect(read, meta)
    except BaseException:
        _taken.release()
        raise
    return StoreClient(connected.store, meta, connected.number, common.world_size, options)


def give_back(client: StoreClient) -> None:
    """The client is closed; the process may make another one."""
    client.meta.close()
    _taken.release()


def _connect(options: MemcacheOptions, meta: MetaService) -> MemcacheConnection:
    """A pool may not let a client in while another one joins or leaves: what failed is tried again."""
    for _ in range(JOINS - 1):
        try:
            return connect(options, meta)
        except Unreachable as error:
            log.info("direct_client_refused", error=str(error))
    return connect(options, meta)


def _own_address(url: str) -> str:
    """A free port beside the host's: each client has its own.

    :raises Unusable: the address is not this machine's.
    """
    host = urlsplit(url).hostname or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    except OSError as error:
        raise Unusable(f"pool.memcache.hcom_url = {url!r} is no address of this machine: {error}") from error
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"

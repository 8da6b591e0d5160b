"""The agent's own client of the pool, and the watchdog that ends the process when one of its copies hangs.

The library keeps one client per process whatever is made of it, its close takes seconds with the GIL held, and a
process that ends without it aborts. So it is made once, and closed with the agent or at exit.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog

from layerflow.device.base import Device
from layerflow.hosts.backend import Unreachable, Unusable
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.setup import MemcacheConnection, MemcacheOptions, connect, shared
from layerflow.system.threads import OwnedThread

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


# Ends the process when a copy that cannot be called back is under way longer than it may.
#
# A load past the arena writes into engine memory by hardware that nobody here can stop. When its step's waits have
# failed the engine writes those blocks itself, so a load that is still under way then would be a silent race. A save
# that outlives its lease would write into room that the pool has given to another object. Both end with the process.


RESTART_S = 0.05
EXIT_STUCK = 83
"""How the process ends."""


class _Alarm(NamedTuple):
    due: float
    number: int
    direction: str
    step: int


def end_process() -> None:
    """At once, with nothing cleaned up: the death of the process is what stops the copy."""
    os._exit(EXIT_STUCK)


class Watchdog:
    """One thread, which wakes once for each alarm.

    :param end: what ends the process.
    """

    def __init__(self, end: Callable[[], None] = end_process) -> None:
        self._end = end
        self._alarms: list[_Alarm] = []
        self._numbers = itertools.count()
        self._in_flight: dict[str, tuple[int, int, float]] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = OwnedThread("layerflow-watchdog", self._run, restart_s=RESTART_S).start()

    def expect(self, direction: str, step: int, due: float) -> None:
        """No copy of the step in this direction may be under way at `due`, monotonic seconds."""
        with self._changed:
            heapq.heappush(self._alarms, _Alarm(due, next(self._numbers), direction, step))
            if self._alarms[0].due == due:
                self._changed.notify()

    @contextlib.contextmanager
    def in_flight(self, direction: str, step: int, layer: int) -> Iterator[None]:
        """A copy runs inside; one at a time in each direction."""
        self._in_flight[direction] = step, layer, time.monotonic()
        try:
            yield
        finally:
            del self._in_flight[direction]

    def close(self) -> None:
        """No alarm is heard any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (alarm := self._next()) is not None:
            running = self._in_flight.get(alarm.direction)
            if running is not None and running[0] == alarm.step:
                now = time.monotonic()
                log.critical(
                    "direct_copy_stuck",
                    direction=alarm.direction,
                    step=alarm.step,
                    layer=running[1],
                    under_way_s=round(now - running[2], 3),
                    exit_code=EXIT_STUCK,
                    error="it cannot be called back, and may not run on beside the engine: this process ends",
                )
                self._end()

    def _next(self) -> _Alarm | None:
        """The next alarm, once it is due."""
        with self._changed:
            while not self._closed:
                left = self._alarms[0].due - time.monotonic() if self._alarms else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._alarms)
                self._changed.wait(left)
        return None

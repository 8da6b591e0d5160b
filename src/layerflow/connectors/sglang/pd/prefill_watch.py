"""A connection to each rank of each prefill engine, over which nothing is sent: it breaks when the rank ends."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from layerflow.connectors.common.guard import attempt
from layerflow.system.threads import OwnedThread

MOST_RANKS = 4096
"""Connections; of ranks beyond it SGLang's heartbeat tells."""

BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""The peer's process has ended, or nothing listens there."""

log = structlog.get_logger("layerflow.sglang")


@dataclass(frozen=True, slots=True)
class _Rank:
    """:param engine: its bootstrap address. :param monitor: tells what becomes of the connection of `connected`."""

    engine: str
    connected: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class PrefillWatch:
    """Tells of prefill engines whose processes have ended, as soon as the system closes their connections.

    SGLang's heartbeat asks every five seconds and waits for the second miss. A machine that is gone without a word, or
    a process that stands still, is left to it.

    :param lost: called with an engine's bootstrap address, on the watch's own thread, once for each rank.
    """

    def __init__(self, lost: Callable[[str], object]) -> None:
        self._lost = lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._asked = queue.SimpleQueue[tuple[str, str] | None]()
        self._woken, self._wake = os.pipe()
        self._ranks: dict[str, _Rank] = {}  #: by endpoint; the thread's own, but for looks into it
        self._thread = OwnedThread("layerflow-prefill-watch", self._watch, restart_s=0.1).start()

    def __len__(self) -> int:
        """Ranks that are watched now."""
        return len(self._ranks)

    def watch(self, engine: str, endpoints: Iterable[str]) -> None:
        """Watch an engine's ranks, until they end. Any thread may call, again and again.

        A rank that ends while this runs is told of in any case: either its end is not noticed yet, or it is connected
        to anew, which fails.

        :param engine: its bootstrap address. :param endpoints: ZMQ's, of its ranks.
        """
        for endpoint in endpoints:
            if endpoint not in self._ranks:
                self._tell((engine, endpoint))

    def close(self) -> None:
        """Hang up, and end the thread."""
        self._tell(None)
        self._thread.join(5.0)

    def _tell(self, asked: tuple[str, str] | None) -> None:
        self._asked.put(asked)
        os.write(self._wake, b"\0")

    def _watch(self) -> None:
        while True:
            poller = zmq.Poller()
            poller.register(self._woken, zmq.POLLIN)
            for rank in self._ranks.values():
                poller.register(rank.monitor, zmq.POLLIN)
            ready = dict(poller.poll())
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                if not self._take_asked():
                    break
            for endpoint in [endpoint for endpoint, rank in self._ranks.items() if rank.monitor in ready]:
                self._hear(endpoint)
        for endpoint in list(self._ranks):
            self._hang_up(endpoint)
        self._context.term()
        os.close(self._woken)
        os.close(self._wake)

    def _take_asked(self) -> bool:
        """Connect to the ranks that were asked for; False = end."""
        with suppress(queue.Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked is None:
                    return False
                engine, endpoint = asked
                if endpoint not in self._ranks and len(self._ranks) < MOST_RANKS:
                    self._connect(engine, endpoint)
        return True

    def _connect(self, engine: str, endpoint: str) -> None:
        connected = self._context.socket(zmq.PUSH)
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.IPV6, 1)
        connected.setsockopt(zmq.RECONNECT_IVL, -1)  # one that has ended is over: another may get its port
        monitor = connected.get_monitor_socket(BROKEN)
        self._ranks[endpoint] = _Rank(engine, connected, monitor)
        connected.connect(endpoint)

    def _hear(self, endpoint: str) -> None:
        rank = self._ranks[endpoint]
        event = recv_monitor_message(rank.monitor)["event"]
        if not event & BROKEN:
            return
        # First forgotten, then told of: see watch().
        self._hang_up(endpoint)
        attempt(lambda: self._lost(rank.engine), "prefill engine's end")

    def _hang_up(self, endpoint: str) -> None:
        rank = self._ranks.pop(endpoint)
        rank.connected.disable_monitor()
        rank.monitor.close(0)
        rank.connected.close(0)

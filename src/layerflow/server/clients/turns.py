"""Each client's messages one after the other, long ones in slices, so that no message holds the server's loop.

A message is a generator that stops every half millisecond or so. What a client sends while one of its messages is not
finished waits behind it; other clients' messages, timers and descriptors get their turn between two slices.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from layerflow.server.clients.account import Account, Charge, Refused

SLICE_S = 0.0005
"""How long one client's message may run before another gets its turn, in seconds."""

MAX_WAITING = 1024
"""Messages that one client may have waiting behind one that is not finished."""

Work = Generator[None, None, None]


@dataclass(slots=True)
class _Queue:
    """One client's unfinished messages, oldest first: the work, and what the message that asks for it keeps."""

    waiting: deque[tuple[Work, Charge]] = field(default_factory=deque)


class Turns:
    """What the clients have asked for and is not finished; runs on the running loop."""

    def __init__(self) -> None:
        self._queues: dict[Account, _Queue] = {}
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Is some message not finished?"""
        return bool(self._queues)

    def start(self, client: Account, work: Work, nbytes: int = 0, *, always: bool = False) -> None:
        """Run it now, or behind what this client has waiting.

        :param work: handles its own exceptions; closed unfinished when the client is lost.
        :param nbytes: of the message that asks for it.
        :param always: however much waits: it goes on with what has begun, or lets something end.
        :raises Refused: it would have to wait, and there is no room for that.
        """
        queue = self._queues.get(client)
        if queue is None:
            if _run(work, time.monotonic() + SLICE_S) or client.closed:
                return
            queue, always = self._queues.setdefault(client, _Queue()), True
        elif len(queue.waiting) >= MAX_WAITING and not always:
            raise Refused("quota", f"{MAX_WAITING} of this client's messages wait to be handled; send them more slowly")
        charge = client.charge("a message that waits to be handled", nbytes, always=always)
        queue.waiting.append((work, charge))
        self._schedule()

    def forget(self, client: Account) -> None:
        """The client is gone: what it has waiting is closed."""
        queue = self._queues.pop(client, None)
        if queue is None:
            return
        for work, charge in queue.waiting:
            charge.release()
            if not inspect.isgenerator(work) or not work.gi_running:
                work.close()

    def _schedule(self) -> None:
        if not self._scheduled and self._queues:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """One slice of the client whose turn it is; the next one's follows on the loop's next round."""
        self._scheduled = False
        if not self._queues:
            return
        client, queue = next(iter(self._queues.items()))
        until = time.monotonic() + SLICE_S
        try:
            while True:
                work, charge = queue.waiting[0]
                finished = True  # also where it raises
                try:
                    finished = _run(work, until)
                finally:
                    if finished:
                        queue.waiting.popleft()
                        charge.release()
                if not queue.waiting or time.monotonic() >= until:
                    break
        finally:
            if self._queues.get(client) is queue:  # not lost meanwhile
                del self._queues[client]
                if queue.waiting:
                    self._queues[client] = queue  # behind the others
            self._schedule()


def _run(work: Work, until: float) -> bool:
    """Run until `until` (monotonic seconds); whether it has finished."""
    return all(time.monotonic() < until for _ in work)

"""Calls to the MetaService, made by a thread that can be given up.

The library waits a minute for an answer, whatever its configuration says: from a MetaService that hangs, and from one
that has ended, though its connection to the next one is made meanwhile and other calls get through. Nobody else may
wait so long: a lookup has its own deadline, and a lane that waited for a minute would be taken for a host that hangs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from layerflow.hosts.backend import Unreachable

ANSWER_S = 0.5
"""An answer that the MetaService gave before it ended has come by then."""
LOOK_S = 0.1
MAX_GIVEN_UP = 32
"""Calls that may be given up with no answer to another one in between. Past this only probes are made."""
MAX_THREADS = 256
"""Threads whose calls were given up and have not come back, for up to a minute. Past this no call is made."""

T = TypeVar("T")


class _Call:
    """One call, and what came of it once `done` can be acquired."""

    __slots__ = ("answer", "call", "done", "error")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answer: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.answer = self.call()
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            self.error = error
        self.done.release()


class AbandonableCaller:
    """Makes calls for other threads, one at a time for each.

    :param generation: changes when the MetaService ends; see ``Service.generation``.
    :param answer_s: see :data:`ANSWER_S`.
    :param look_s: how often it looks whether the MetaService has ended, in seconds.
    """

    def __init__(self, generation: Callable[[], int], answer_s: float = ANSWER_S, look_s: float = LOOK_S) -> None:
        self._generation, self._answer_s, self._look_s = generation, answer_s, look_s
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[_Call | None]] = {}  # by the thread that asks
        self._given_up: list[_Call] = []
        self._in_a_row = 0  # calls that were given up since the last answer

    def ask(self, call: Callable[[], T], until: float = math.inf, *, probing: bool = False) -> T:
        """What the call returns, or raises.

        :param until: so long it is waited for, on the monotonic clock.
        :param probing: the call is made although many in a row were given up: its answer lets others through again.
            What was asked over a connection that the library has lost comes back a minute later, though the
            MetaService may be well again by then.
        :raises Unreachable: no answer by then, or the MetaService has ended meanwhile. The call may come back later;
            nobody hears of it.
        """
        generation, pending = self._generation(), _Call(call)
        with self._lock:
            self._given_up = [each for each in self._given_up if each.done.locked()]
            unanswered = len(self._given_up)
            if unanswered >= MAX_THREADS or (min(unanswered, self._in_a_row) >= MAX_GIVEN_UP and not probing):
                raise Unreachable(f"{unanswered} calls to memcache's MetaService are still unanswered")
            queue = self._queues.get(threading.get_ident())
            if queue is None:
                queue = self._queues[threading.get_ident()] = SimpleQueue()
                threading.Thread(target=_serve, args=(queue,), name="layerflow-meta", daemon=True).start()
            queue.put(pending)
        why = "memcache's MetaService did not answer in time"
        ended = False
        while not pending.done.acquire(timeout=max(0.0, min(self._look_s, until - time.monotonic()))):
            # Generation 0: it is not there now, but the library may not have seen that yet.
            if not ended and (not generation or self._generation() != generation):
                ended, why = True, "memcache's MetaService ended while it was asked"
                until = min(until, time.monotonic() + self._answer_s)
            if time.monotonic() >= until:
                with self._lock:
                    self._given_up.append(pending)
                    self._in_a_row += 1
                    queue.put(None)  # the next call of this thread is made by another one
                    self._queues.pop(threading.get_ident(), None)
                raise Unreachable(why)
        with self._lock:
            self._in_a_row = 0
        if pending.error is not None:
            raise pending.error
        answer: T = pending.answer
        return answer

    def close(self) -> None:
        """End the threads, once what they were asked has come back; the next calls have others."""
        with self._lock:
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (pending := calls.get()) is not None:
        pending.run()

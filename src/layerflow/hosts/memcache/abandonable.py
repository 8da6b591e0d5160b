"""Calls to the MetaService, made by a thread that can be given up.

What a MetaService that has ended was asked nobody answers, and the library waits a minute for it, whatever its
configuration says. Its connection to the next MetaService is made meanwhile, and other calls get through.
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
    """Makes the calls of one thread, one at a time.

    :param generation: changes when the MetaService ends; see ``MetaService.generation``.
    :param answer_s: see :data:`ANSWER_S`.
    :param look_s: how often it looks whether the MetaService has ended, in seconds.
    """

    def __init__(self, generation: Callable[[], int], answer_s: float = ANSWER_S, look_s: float = LOOK_S) -> None:
        self._generation, self._answer_s, self._look_s = generation, answer_s, look_s
        self._lock = threading.Lock()
        self._errands: SimpleQueue[_Call | None] | None = None

    def ask(self, call: Callable[[], T]) -> T:
        """What the call returns, or raises.

        :raises Unreachable: the MetaService has ended meanwhile. The call may come back later; nobody hears of it.
        """
        generation, errand = self._generation(), _Call(call)
        with self._lock:
            if self._errands is None:
                errands: SimpleQueue[_Call | None] = SimpleQueue()
                threading.Thread(target=_serve, args=(errands,), name="layerflow-meta", daemon=True).start()
                self._errands = errands
            self._errands.put(errand)
        # 0: it is not there now, but the library may not have seen that yet.
        until = math.inf if generation else time.monotonic() + self._answer_s
        while not errand.done.acquire(timeout=self._look_s):
            if until == math.inf and self._generation() != generation:
                until = time.monotonic() + self._answer_s
            elif time.monotonic() >= until:
                self.close()
                raise Unreachable("memcache's MetaService ended while it was asked")
        if errand.error is not None:
            raise errand.error
        answer: T = errand.answer
        return answer

    def close(self) -> None:
        """End the thread, once the call under way has come back; the next call has another."""
        with self._lock:
            if self._errands is not None:
                self._errands.put(None)
                self._errands = None


class AbandonableCalls:
    """One :class:`AbandonableCaller` for every thread that asks.

    :param generation: see there.
    """

    def __init__(self, generation: Callable[[], int]) -> None:
        self._generation = generation
        self._own = threading.local()
        self._all: list[AbandonableCaller] = []

    def ask(self, call: Callable[[], T]) -> T:
        """See :meth:`AbandonableCaller.ask`."""
        asker: AbandonableCaller | None = getattr(self._own, "asker", None)
        if asker is None:
            asker = self._own.asker = AbandonableCaller(self._generation)
            self._all.append(asker)
        return asker.ask(call)

    def close(self) -> None:
        """End their threads, once what they were asked has come back."""
        for asker in self._all:
            asker.close()


def _serve(errands: SimpleQueue[_Call | None]) -> None:
    while (errand := errands.get()) is not None:
        errand.run()

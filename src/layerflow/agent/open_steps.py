"""Which steps are open, which requests they touch, and what ended since the engine last asked."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from layerflow.agent.step.step import Step
from layerflow.agent.values import Ended

SHED = "shed"
NOTHING = Ended()


class OpenSteps:
    """Shared by the engine's thread, the link and the lanes; one lock, never held while waiting for I/O."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self._steps: dict[int, Step] = {}
        self._busy: Counter[str] = Counter()
        self._aborting: set[str] = set()
        self._ended: deque[tuple[str, str, str]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Open; the caller holds the lock."""
        self._steps[step.number] = step
        self._busy.update(step.requests)

    def get(self, number: int) -> Step | None:
        """By number; None once finished."""
        return self._steps.get(number)

    def steps(self) -> list[Step]:
        """All open steps."""
        with self.lock:
            return list(self._steps.values())

    def finish(self, step: Step, ended: Callable[[Step], None]) -> None:
        """Close, unless it was closed already.

        :param ended: told of the step, under the lock, before the threads that wait for its end.
        """
        with self.lock:
            if self._steps.pop(step.number, None) is None:
                return
            ended(step)
            self._busy.subtract(step.requests)
            for request in step.requests:
                if not self._busy[request]:
                    del self._busy[request]
                    self._release(request)
            self._idle.notify_all()

    def busy(self, request: str) -> bool:
        """Does an open step touch this request's blocks?"""
        return request in self._busy

    def wait_idle(self, request: str, timeout_s: float) -> bool:
        """Wait until none does; False after `timeout_s`."""
        with self.lock:
            return self._idle.wait_for(lambda: not self._busy[request], timeout_s)

    def abort(self, request: str) -> list[Step]:
        """The engine gave a request up: the open steps that still touch its blocks.

        It is reported released when the server says so or the last of these steps has ended, whichever is first.
        """
        with self.lock:
            self._aborting.add(request)
            if not self._busy[request]:
                self._release(request)
            return [step for step in self._steps.values() if request in step.requests]

    def released(self, request: str) -> None:
        """An aborted request's blocks are free."""
        with self.lock:
            self._release(request)

    def saved(self, request: str) -> None:
        """Some of the request's chunks are published."""
        self._ended.append(("saved", request, ""))

    def save_failed(self, request: str, reason: str) -> None:
        """Some of the request's chunks were given up."""
        self._ended.append(("failed", request, reason))

    def _release(self, request: str) -> None:
        if request in self._aborting:
            self._aborting.discard(request)
            self._ended.append(("released", request, ""))

    def poll(self) -> Ended:
        """What ended since the last call."""
        if not self._ended:  # nearly always: engines ask in every step
            return NOTHING
        columns: dict[str, list[tuple[str, str]]] = {"released": [], "saved": [], "failed": []}
        while self._ended:
            kind, request, reason = self._ended.popleft()
            columns[kind].append((request, reason))
        return Ended(
            tuple(request for request, _ in columns["released"]),
            tuple(request for request, _ in columns["saved"]),
            tuple(columns["failed"]),
            tuple(request for request, reason in columns["failed"] if reason == SHED),
        )

"""Lookups that a scheduler starts now and asks about later, so that it never waits for a server.

One thread owns the conversation with the server; whoever schedules leaves a question and takes the
answer when it is there. A server that is away answers "nothing", within the client's own timeout.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import structlog

from layerflow.agent.control import Control
from layerflow.agent.values import MISS, Hit
from layerflow.errors import LayerflowError
from layerflow.keys import Chain

log = structlog.get_logger("layerflow.agent.lookups")


@dataclass(slots=True)
class Inquiry:
    """One lookup under way.

    :param asked_at: monotonic seconds.
    :param hit: the answer; None until :attr:`answered` is set.
    """

    request: str
    chain: Chain
    asked_at: float
    hit: Hit | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float) -> Hit | None:
        """The answer, or None if it has not come after `timeout_s`."""
        if self.hit is None and timeout_s > 0:
            self.answered.wait(timeout_s)
        return self.hit


class Lookups:
    """Asks one server for a scheduler.

    :param control: the client to ask with; used by this object's thread only, and closed with it.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._jobs: queue.SimpleQueue[Inquiry | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="layerflow-lookups", daemon=True)
        self._thread.start()

    def ask(self, request: str, chain: Chain) -> Inquiry:
        """Start a lookup; its hit will be leased. Returns at once."""
        inquiry = Inquiry(request, chain, time.monotonic())
        self._jobs.put(inquiry)
        return inquiry

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded. Returns at once."""
        self._jobs.put(request)

    def close(self) -> None:
        """Stop and hang up; leases expire by themselves."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._control.connect()
        while (job := self._jobs.get()) is not None:
            if isinstance(job, str):
                self._control.drop_lease(job)
            else:
                self._answer(job)
        self._control.close()

    def _answer(self, inquiry: Inquiry) -> None:
        try:
            inquiry.hit = self._control.lookup(inquiry.request, inquiry.chain)
        except LayerflowError as error:
            log.warning("lookup_failed", request=inquiry.request, error=str(error))
            inquiry.hit = MISS
        finally:
            # Whatever happened, nobody waits for it longer.
            inquiry.hit = inquiry.hit or MISS
            inquiry.answered.set()

"""Lookups that a scheduler starts now and asks about later, so that it never waits for a server.

Questions and answers pass on the scheduler's own thread: handing them to another one would cost two wake-ups. Only
connecting happens elsewhere. A prompt of which nothing is stored is not even asked about. A server that is away, or
has not answered in time, has nothing.

An engine that can recompute failed blocks may use the presence table's answer at once. The server's lease arrives
later; until then an object may be evicted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence

import structlog
import zmq

from layerflow.agent.client import (
    DEFAULT_HANDOFF_TIMEOUT_S,
    DEFAULT_LEASE_S,
    ControlConnection,
    HandoffInquiry,
    Inquiry,
    InquiryState,
    ServerClient,
)
from layerflow.agent.control import DEFAULT_LOOKUP_TIMEOUT_S
from layerflow.agent.values import MISS, Follow, Handoff, Hit
from layerflow.errors import DeadlineExceeded, LayerflowError
from layerflow.keys import Chain
from layerflow.spec import ModelSpec
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import EndHandoff, ReleaseHandoff

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.1
PROMPT_S = 0.05
"""A server that owes an answer for so long may have stopped: what its table shows is taken for no further answer."""

log = structlog.get_logger("layerflow.agent.lookups")


class Lookups(ServerClient):
    """Asks one server, for one thread; connects by itself, again whenever the server was away.

    :param engine: identifies the engine whose workers load what is leased here.
    :param name: what it is called in status, logs and metrics; "" = `engine`.
    :param timeout_s: a server that has not answered after so long is away.
    :param at_sight: take what the server's table shows for an answer, without a lease at first.
    """

    def __init__(
        self,
        endpoint: str,
        engine: str,
        spec: ModelSpec,
        *,
        name: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_S,
        at_sight: bool = False,
    ) -> None:
        super().__init__(endpoint, engine, spec, name=name, context=context)
        self._timeout_s = timeout_s
        self._at_sight = at_sight
        self._current: dict[str, Inquiry] = {}  # by request, what was asked last and is neither loaded nor dropped
        self._dialled: deque[ControlConnection] = deque()
        self._closing = threading.Event()
        self._dialler: OwnedThread
        self._dial()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a server, so that the first lookup finds one; False after `timeout_s`."""
        self._dialler.wait(timeout_s)
        return self._adopt() is not None

    def ask(
        self, request: str, chain: Chain, follow: Follow | None = None, *, compute_s: float | None = None
    ) -> Inquiry:
        """Start a lookup; its hit will be leased. Returns at once.

        :param follow: what is still to be stored may be hit too. With a hand-off there is an answer once it is open,
            has failed or has ended, or at the deadline: a hit that is `following`, or one of what is stored.
        :param compute_s: what computing the prompt takes: what is slower to read from a peer is no hit. None = not
            known.
        """
        inquiry = self.inquiry(request, chain, follow, self._timeout_s)
        self._abandon(request)
        connection = self.reachable()
        if connection is None or (follow is None and connection.misses(chain)):
            inquiry.hit = MISS
            return inquiry
        self._current[request] = inquiry
        self.post(inquiry, connection.question(next(self.numbers), request, chain, follow, compute_s))
        if self._at_sight and not inquiry.waits and inquiry.hit is None:
            self._catch_up()
            if not self._owing(inquiry.asked_at):
                inquiry.seen = connection.hit(chain)
        return inquiry

    def wait(self, inquiry: Inquiry, timeout_s: float) -> Hit | None:
        """The answer, or None if it has not come after `timeout_s`."""
        now = time.monotonic()
        if inquiry.hit is None and inquiry.seen is not None and now - inquiry.asked_at < PROMPT_S:
            return inquiry.seen
        self.await_answer(inquiry, now + max(0.0, timeout_s))
        if inquiry.hit is None and time.monotonic() > inquiry.until:
            self.lost(DeadlineExceeded("a lookup was not answered in time"))
        return inquiry.hit

    def take(self, inquiry: Inquiry, hit: Hit) -> Hit:
        """The hit is handed to the workers now: with the plan that its answer has brought, if it has come."""
        self._catch_up()
        if self._current.get(inquiry.request) is not inquiry:
            return hit
        if inquiry.hit is not None and inquiry.hit != hit:
            return hit
        del self._current[inquiry.request]
        inquiry.enter(InquiryState.TAKEN)
        if inquiry.hit is None:
            return hit
        if inquiry.hit.plan is not None:
            self.plans.consume(inquiry.hit.plan, inquiry.request, 0)
        return inquiry.hit

    def open_handoff(
        self,
        handoff: str,
        chain: Chain,
        tokens: int,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        timeout_s: float = DEFAULT_HANDOFF_TIMEOUT_S,
        servers: Sequence[str] = (),
    ) -> HandoffInquiry:
        """As :meth:`layerflow.agent.Control.open_handoff`. Returns at once; :meth:`handoff` tells what became of it.

        The prompt's steps may be opened meanwhile.
        """
        inquiry = HandoffInquiry(until=time.monotonic() + self._timeout_s, name=handoff)
        self.reachable()
        self.post(inquiry, self.opening(handoff, chain, tokens, lease_s=lease_s, timeout_s=timeout_s, servers=servers))
        return inquiry

    def watch_handoff(self, handoff: str, timeout_s: float) -> HandoffInquiry:
        """What becomes of a hand-off, within `timeout_s`. Returns at once; :meth:`handoff` tells."""
        until = time.monotonic() + timeout_s + self._timeout_s
        inquiry = HandoffInquiry(until=until, name=handoff, watch=True)
        self.reachable()
        self.post(inquiry, self.watching(handoff, timeout_s))
        return inquiry

    def handoff(self, inquiry: HandoffInquiry, timeout_s: float) -> Handoff | None:
        """What was last heard of a hand-off, or None if nothing was after `timeout_s`."""
        until = time.monotonic() + max(0.0, timeout_s)
        self._catch_up(0)
        self.await_answer(inquiry, until)
        if not inquiry.answered and time.monotonic() > inquiry.until:
            inquiry.error = DeadlineExceeded("the server did not answer")
        return inquiry.state if inquiry.answered else None

    def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        """As :meth:`layerflow.agent.Control.end_handoff`."""
        self.tell(EndHandoff(handoff, tokens, reason))

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        """As :meth:`layerflow.agent.Control.release_handoff`. Returns at once.

        Where the server is away it hears of it as soon as it is connected again, whatever is called here.
        """
        self.releases.add(ReleaseHandoff(handoff, list(servers)), next(self.numbers))
        connection = self.reachable(at_once=True)
        if connection is not None:
            try:
                self.releases.say(connection.conversation)
            except LayerflowError as error:
                self.lost(error)

    @property
    def unheard_releases(self) -> int:
        """As :attr:`layerflow.agent.Control.unheard_releases`."""
        return self.releases.unheard

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded. Returns at once; nothing happens if the server is away."""
        self._abandon(request)
        super().drop_lease(request)

    def close(self) -> None:
        """Hang up; leases expire by themselves."""
        self._closing.set()
        self._dialler.join()
        self._adopt()
        super().close()

    def reachable(self, *, at_once: bool = False) -> ControlConnection | None:
        """The connection, unless the server is seen to have died; the one that was last made, once it is."""
        self._adopt()
        return super().reachable(at_once=at_once)

    def lost(self, error: LayerflowError) -> None:
        """What is open has no answer; connect anew."""
        log.info("lookups_interrupted", reason=str(error), open=len(self._lookups))
        connected = self.connection is not None
        super().lost(error)
        if connected:
            self._dial()

    def _abandon(self, request: str) -> None:
        """What was asked for the request is not loaded; its answer may be yet to come."""
        inquiry = self._current.pop(request, None)
        if inquiry is not None:
            inquiry.enter(InquiryState.DROPPED)
            self.drop_plan(request, self.plans.revoke(request))

    def _catch_up(self, left: int = 1) -> None:
        """Take the answers that no call waits for, until at most `left` lookups have none."""
        while (len(self._lookups) > left or (self._asked and not left)) and self.pump(0.0):
            pass

    def _owing(self, now: float) -> bool:
        """Does the server owe an answer for too long?"""
        oldest = next((each for each in self._lookups.values() if not each.waits), None)
        return oldest is not None and now - oldest.asked_at > PROMPT_S

    def _adopt(self) -> ControlConnection | None:
        """Use the connection that was made meanwhile."""
        if self.connection is None and self._dialled:
            self.connection = self._dialled.popleft()
        return self.connection

    def _dial(self) -> None:
        self._dialler = OwnedThread("layerflow-dial", self._connect, restart_s=RETRY_S).start()

    def _connect(self) -> None:
        while not self._closing.is_set():
            try:
                deadline = time.monotonic() + CONNECT_TIMEOUT_S
                connection = self.dial(deadline)
                # Here, for the scheduler may call nothing for long. What it releases meanwhile it says itself.
                hand_over = functools.partial(self._dialled.append, connection)
                self.releases.say(connection.conversation, deadline, hand_over)
            except LayerflowError:
                self._closing.wait(RETRY_S)
            else:
                return

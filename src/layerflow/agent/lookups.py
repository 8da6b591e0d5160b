"""Lookups that a scheduler starts now and asks about later, so that it never waits for a server.

Questions and answers pass on the scheduler's own thread: handing them to another one would cost two wake-ups. Only
connecting happens elsewhere. A prompt of which nothing is stored is not even asked about. A server that is away, or
has not answered in time, has nothing.

Who can make up for a load that fails need not wait for the answer either: what the server's table shows is taken for
it, and the lease follows a moment later. In between, eviction may take what was seen.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import zmq

from layerflow.agent.client import (
    DEFAULT_HANDOFF_TIMEOUT_S,
    DEFAULT_LEASE_S,
    ENDED,
    SILENT,
    ControlConnection,
    HandoffInquiry,
    Releases,
    hit_of,
    opening_of,
    state_of,
)
from layerflow.agent.control import DEFAULT_LOOKUP_TIMEOUT_S
from layerflow.agent.values import MISS, Follow, Handoff, Hit
from layerflow.errors import DeadlineExceeded, LayerflowError
from layerflow.keys import Chain
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import (
    DropLease,
    EndHandoff,
    Found,
    HandoffState,
    OpenHandoff,
    Problem,
    ReleaseHandoff,
    ToClient,
    WatchHandoff,
)

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.1
PROMPT_S = 0.05
"""A server that owes an answer for so long may have stopped: what its table shows is taken for no further answer."""


log = structlog.get_logger("layerflow.agent.lookups")


@dataclass(slots=True)
class Inquiry:
    """One lookup.

    :param asked_at: monotonic seconds.
    :param hit: the answer; None while it is under way.
    :param until: monotonic seconds: a server that has not answered by then is away.
    :param waits: for a hand-off: the server answers once that is open.
    :param follow: what it may wait for.
    :param seen: what the server's table shows, where that is taken for an answer until there is one.
    :param spent: what was seen is being loaded; the answer comes too late for its plan.
    """

    request: str
    chain: Chain
    asked_at: float
    until: float
    waits: bool = False
    follow: Follow | None = None
    hit: Hit | None = None
    seen: Hit | None = None
    spent: bool = False


class Lookups:
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
        self._endpoint = endpoint
        self._engine = engine
        self._name = name
        self._spec = spec
        self._context = context or zmq.Context.instance()
        self._timeout_s = timeout_s
        self._at_sight = at_sight
        self._numbers = ascending()
        self._open: dict[int, Inquiry] = {}
        self._handoffs: dict[int, HandoffInquiry] = {}
        self._current: dict[str, Inquiry] = {}  # by request, what was asked last and is neither loaded nor dropped
        self._handed: set[str] = set()  # requests whose plan the workers have
        self._connection: ControlConnection | None = None
        self._dialled: deque[ControlConnection] = deque()
        self._releases = Releases()
        self._closing = threading.Event()
        self._dialler: OwnedThread
        self._dial()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a server, so that the first lookup finds one; False after `timeout_s`."""
        self._dialler.wait(timeout_s)
        return self._connected() is not None

    def ask(
        self, request: str, chain: Chain, follow: Follow | None = None, *, compute_s: float | None = None
    ) -> Inquiry:
        """Start a lookup; its hit will be leased. Returns at once.

        :param follow: what is still to be stored may be hit too. With a hand-off there is an answer once it is open,
            has failed or has ended, or at the deadline: a hit that is `following`, or one of what is stored.
        :param compute_s: what computing the prompt takes: what is slower to read from a peer is no hit. None = not
            known.
        """
        now = time.monotonic()
        waits = follow is not None and bool(follow.handoff)
        until = now + self._timeout_s if follow is None or not waits else max(now, follow.deadline) + self._timeout_s
        inquiry = Inquiry(request, chain, now, until, waits, follow)
        self._abandon(request)
        if follow is not None and waits:
            self._releases.forget(follow.handoff)
        connection = self._reachable()
        if connection is None or (follow is None and connection.misses(chain)):
            inquiry.hit = MISS
            return inquiry
        number = next(self._numbers)
        self._open[number] = self._current[request] = inquiry
        try:
            connection.conversation.send(connection.question(number, request, chain, follow, compute_s))
        except LayerflowError as error:
            self._lost(str(error))
            return inquiry
        if self._at_sight and not waits:
            self._catch_up()
            if not self._owing(inquiry.asked_at):
                inquiry.seen = connection.hit(chain)
        return inquiry

    def wait(self, inquiry: Inquiry, timeout_s: float) -> Hit | None:
        """The answer, or None if it has not come after `timeout_s`."""
        now = time.monotonic()
        if inquiry.hit is None and inquiry.seen is not None and now - inquiry.asked_at < PROMPT_S:
            return inquiry.seen
        until = now + max(0.0, timeout_s)
        while inquiry.hit is None and self._hear(until):
            pass
        if inquiry.hit is None and time.monotonic() > inquiry.until:
            self._lost("a lookup was not answered in time")
        return inquiry.hit

    def take(self, inquiry: Inquiry, hit: Hit) -> Hit:
        """The hit is handed to the workers now: with the plan that its answer has brought, if it has come."""
        self._catch_up()
        if self._current.get(inquiry.request) is not inquiry:
            return hit
        if inquiry.hit == hit:
            del self._current[inquiry.request]
            if inquiry.hit.plan is not None:
                self._handed.add(inquiry.request)
            return inquiry.hit
        if inquiry.hit is None:
            inquiry.spent = True
            del self._current[inquiry.request]
        return hit

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
        inquiry = HandoffInquiry(handoff, time.monotonic() + self._timeout_s)
        self._ask_of(inquiry, opening_of(next(self._numbers), handoff, chain, tokens, lease_s, timeout_s, servers))
        return inquiry

    def watch_handoff(self, handoff: str, timeout_s: float) -> HandoffInquiry:
        """What becomes of a hand-off, within `timeout_s`. Returns at once; :meth:`handoff` tells."""
        inquiry = HandoffInquiry(handoff, time.monotonic() + timeout_s + self._timeout_s, watch=True)
        self._ask_of(inquiry, WatchHandoff(next(self._numbers), handoff, max(1, round(timeout_s * 1e3))))
        return inquiry

    def handoff(self, inquiry: HandoffInquiry, timeout_s: float) -> Handoff | None:
        """What was last heard of a hand-off, or None if nothing was after `timeout_s`."""
        until = time.monotonic() + max(0.0, timeout_s)
        self._catch_up(0)
        while inquiry.state is None and self._hear(until):
            pass
        if inquiry.state is None and time.monotonic() > inquiry.until:
            inquiry.state = Handoff(inquiry.name, "unknown", 0, SILENT)
        return inquiry.state

    def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        """As :meth:`layerflow.agent.Control.end_handoff`."""
        self._tell(EndHandoff(handoff, tokens, reason))

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        """As :meth:`layerflow.agent.Control.release_handoff`. Returns at once.

        Where the server is away it hears of it as soon as it is connected again, whatever is called here.
        """
        self._releases.add(ReleaseHandoff(handoff, list(servers)), next(self._numbers))
        connection = self._reachable(at_once=True)
        if connection is not None:
            try:
                self._releases.say(connection.conversation)
            except LayerflowError as error:
                self._lost(str(error))

    @property
    def unheard_releases(self) -> int:
        """As :attr:`layerflow.agent.Control.unheard_releases`."""
        return self._releases.unheard

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded. Returns at once; nothing happens if the server is away."""
        self._abandon(request)
        handed = request in self._handed
        self._handed.discard(request)
        self._tell(DropLease(request, 0 if handed else -1))

    def close(self) -> None:
        """Hang up; leases expire by themselves."""
        self._closing.set()
        self._dialler.join()
        connection = self._connected()
        if connection is not None:
            connection.hang_up()
        self._connection = None
        self._releases.close()

    def _abandon(self, request: str) -> None:
        """What was asked for the request is not loaded; its answer may be yet to come."""
        inquiry = self._current.pop(request, None)
        if inquiry is not None and inquiry.hit is not None and inquiry.hit.plan is not None:
            inquiry.hit.plan.void = True
            self._tell(DropLease(request, inquiry.hit.plan.number))

    def _tell(self, message: DropLease | EndHandoff) -> None:
        if self._connection is not None:
            try:
                self._connection.conversation.send(message)
            except LayerflowError as error:
                self._lost(str(error))

    def _ask_of(self, inquiry: HandoffInquiry, message: OpenHandoff | WatchHandoff) -> None:
        connection = self._reachable()
        if connection is None:
            inquiry.state = Handoff(inquiry.name, "unknown", 0, "no server is connected")
            return
        self._handoffs[message.id] = inquiry
        try:
            connection.conversation.send(message)
        except LayerflowError as error:
            self._lost(str(error))

    def _catch_up(self, left: int = 1) -> None:
        """Take the answers that no call waits for, until at most `left` lookups have none."""
        while (len(self._open) > left or (self._handoffs and not left)) and self._hear(0.0):
            pass

    def _hear(self, until: float) -> bool:
        """Take one answer, or lose the connection; False: there is no connection, or nothing came by `until`."""
        if self._connection is None:
            return False
        try:
            self._heard(self._connection.conversation.next(until))
        except DeadlineExceeded:
            return False
        except LayerflowError as error:
            self._lost(str(error))
        return True

    def _owing(self, now: float) -> bool:
        """Does the server owe an answer for too long?"""
        oldest = next((each for each in self._open.values() if not each.waits), None)
        return oldest is not None and now - oldest.asked_at > PROMPT_S

    def _heard(self, message: ToClient) -> None:
        if isinstance(message, (Found, HandoffState)):
            self._releases.heard(message.id)
        if isinstance(message, Found):
            inquiry = self._open.pop(message.id, None)
            if inquiry is not None:
                inquiry.hit = hit_of(message, inquiry.chain, self._spec, inquiry.follow)
                self._settle_plan(inquiry, message)
                if message.tails and not inquiry.hit.tokens:
                    self.drop_lease(inquiry.request)  # of tails that are another prompt's
        elif isinstance(message, HandoffState):
            watched = self._handoffs.get(message.id)
            if watched is not None:
                watched.state = state_of(message)
                if message.state in ENDED or not watched.watch:
                    del self._handoffs[message.id]
        elif isinstance(message, Problem):
            refused = self._handoffs.pop(message.id, None)
            if refused is not None:
                refused.state = Handoff(refused.name, "refused", 0, message.message)
            inquiry = self._open.pop(message.id, None)
            if inquiry is not None:
                log.warning("lookup_refused", request=inquiry.request, code=message.code, error=message.message)
                inquiry.hit = MISS

    def _settle_plan(self, inquiry: Inquiry, found: Found) -> None:
        """A plan that nobody will use is given up at once."""
        wanted, hit = self._current.get(inquiry.request) is inquiry, inquiry.hit
        if not found.plan or hit is None or (wanted and hit.plan is not None):
            return
        # What is here of a hit that is not here whole, or of what was seen and is about to be loaded, stays leased.
        leased = inquiry.spent or (wanted and hit.tokens)
        lease_ms = self._connection.lease_ms if leased and self._connection is not None else 0
        self._tell(DropLease(inquiry.request, found.plan, lease_ms))

    def _connected(self) -> ControlConnection | None:
        if self._connection is None and self._dialled:
            self._connection = self._dialled.popleft()
        return self._connection

    def _reachable(self, *, at_once: bool = False) -> ControlConnection | None:
        connection = self._connected()
        if connection is not None and connection.hung_up(at_once=at_once):
            self._lost("the server has hung up")
            return None
        return connection

    def _lost(self, reason: str) -> None:
        """What is open has no answer; connect anew."""
        log.info("lookups_interrupted", reason=reason, open=len(self._open))
        for inquiry in self._open.values():
            inquiry.hit = MISS
        self._open.clear()
        for watched in self._handoffs.values():
            watched.state = Handoff(watched.name, "unknown", 0, reason)
        self._handoffs.clear()
        if self._connection is not None:
            self._connection.hang_up()
            self._connection = None
            self._releases.interrupted()
            self._dial()

    def _dial(self) -> None:
        self._dialler = OwnedThread("layerflow-dial", self._connect, restart_s=RETRY_S).start()

    def _connect(self) -> None:
        while not self._closing.is_set():
            try:
                deadline = time.monotonic() + CONNECT_TIMEOUT_S
                connection = ControlConnection.connect(
                    self._context, self._endpoint, self._engine, self._spec, deadline, name=self._name
                )
                # Here, for the scheduler may call nothing for long. What it releases meanwhile it says itself.
                hand_over = functools.partial(self._dialled.append, connection)
                self._releases.say(connection.conversation, deadline, hand_over)
            except LayerflowError:
                self._closing.wait(RETRY_S)
            else:
                return

"""The control client: looks up, leases, asks for status. For schedulers and tools; moves no bytes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import structlog
import zmq

from layerflow.agent.client import (
    DEFAULT_HANDOFF_TIMEOUT_S,
    DEFAULT_LEASE_S,
    ENDED,
    ControlConnection,
    Releases,
    hit_of,
    lookup_of,
    opening_of,
    state_of,
)
from layerflow.agent.handshake import ClientKeys
from layerflow.agent.hit_plan import PlansInHand
from layerflow.agent.values import MISS, Follow, Handoff, Hit
from layerflow.errors import LayerflowError, RemoteError, ServerLost, SessionError, SessionUnknown
from layerflow.keys import Chain
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire.messages import (
    DropLease,
    EndHandoff,
    Found,
    HandoffState,
    Lookup,
    Message,
    OpenHandoff,
    Purge,
    ReleaseHandoff,
    Reset,
    Status,
    StatusRequest,
    ToClient,
    WatchHandoff,
)

log = structlog.get_logger("layerflow.agent.control")

DEFAULT_LOOKUP_TIMEOUT_S = 0.2
DEFAULT_TIMEOUT_S = 2.0
PURGE_TIMEOUT_S = 15.0
"""Longer than the server waits for the pool behind its arena."""
AWAY_S = 0.5
"""After a lookup without an answer, lookups miss at once for so long instead of waiting again."""


class Control:
    """A synchronous control client; safe to share between threads, one call at a time.

    Connects at the first call, and again after the server was away.

    :param endpoint: of the server, ``ipc://``, ``inproc://`` or ``tcp://`` with `keys`.
    :param engine: identifies the engine whose workers load what this client leases.
    :param name: what that engine is called in status, logs and metrics; "" = `engine`.
    :param spec: needed for lookups.

    :ivar plans: of hits that were told here and are not loaded yet.
    """

    def __init__(
        self,
        endpoint: str,
        engine: str = "",
        spec: ModelSpec | None = None,
        *,
        name: str = "",
        keys: ClientKeys | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        lookup_timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_S,
    ) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._name = name
        self._spec = spec
        self._keys = keys
        self._context = context or zmq.Context.instance()
        self._lookup_timeout_s = lookup_timeout_s
        self.plans = PlansInHand()
        self._lock = threading.Lock()
        self._ids = ascending()
        self._connection: ControlConnection | None = None
        self._releases = Releases()
        self._away_until = 0.0

    @property
    def unheard_releases(self) -> int:
        """Hand-offs that the server was never told to release, for it was away until their leases had ended them."""
        return self._releases.unheard

    def connect(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Connect anew, so that the first lookup does not pay for it; False if the server did not answer."""
        with self._lock:
            self._drop()
            try:
                self._connected(time.monotonic() + timeout_s)
            except LayerflowError:
                return False
            self._away_until = 0.0
            return True

    def lookup(self, request: str, chain: Chain, follow: Follow | None = None) -> Hit:
        """The longest hit for a prompt, leased. A server that is away or slow is a miss.

        The server is not asked where its presence table shows that nothing is stored.

        :param follow: what is still to be stored may be hit too. With a hand-off this waits until it is open, at most
            until its deadline, and other calls with it: such a lookup is best given a control client of its own.
        :raises SessionError: the client was made without a spec.
        """
        if self._spec is None:
            raise SessionError("lookups need the model's spec; pass spec= to Control")
        deadline = time.monotonic() + self._lookup_timeout_s
        # A lookup behind another one that waits for a stopped server waits no longer than for its own answer.
        if not self._lock.acquire(timeout=self._lookup_timeout_s):
            return MISS
        try:
            if time.monotonic() < self._away_until:
                return MISS
            connection = self._connected(deadline)
            if follow is None and connection.misses(chain):
                return MISS
            self._give_up(self.plans.overdue(time.monotonic()))
            message = connection.question(next(self._ids), request, chain, follow)
            if follow is not None and follow.handoff:
                self._releases.forget(follow.handoff)
                deadline = max(deadline, follow.deadline + self._lookup_timeout_s)
            found = cast(Found, self._exchange(message, Found, deadline))
            return self._take(request, hit_of(found, chain, self._spec, follow), found, message.lease_ms)
        except RemoteError as error:
            log.warning("lookup_refused", request=request, code=error.code, error=error.message)
            return MISS
        except LayerflowError:
            self._away_until = time.monotonic() + AWAY_S
            return MISS
        finally:
            self._lock.release()

    def _take(self, request: str, hit: Hit, found: Found, lease_ms: int) -> Hit:
        """Hold the hit's plan, or give it up where it is none of this hit: what is there of it stays leased."""
        if hit.plan is not None:
            void = self.plans.give(request, hit.plan, time.monotonic() + lease_ms / 1e3)
            self._give_up([(request, number) for number in void])
        elif found.plan:
            self._give_up([(request, found.plan)], lease_ms if hit.tokens else 0)
        return hit

    def _give_up(self, plans: Iterable[tuple[str, int]], lease_ms: int = 0) -> None:
        """Tell the server, if it is there: else it has nothing that is pinned for them."""
        if self._connection is not None:
            with contextlib.suppress(ServerLost):
                for request, number in plans:
                    self._connection.conversation.send(DropLease(request, number, lease_ms))

    def written(self, chain: Chain, timeout_s: float) -> Hit:
        """How much of a prompt another node of the pool can load, once nothing of it is on its way there.

        Saves are reported when they are in this server's arena; their writes to the pool behind it may still be going
        on, fail or be shed. To be asked when the saves of a hand-off have been reported; what is missing then never
        comes. Blocks, and other calls with it: a hand-off has a control client of its own.

        :param timeout_s: so long writes are waited for; what is not written by then does not count.
        :raises LayerflowError: the server did not answer.
        """
        if self._spec is None:
            raise SessionError("lookups need the model's spec; pass spec= to Control")
        message = msgspec.structs.replace(
            lookup_of(next(self._ids), "", chain, 1, 0), written_ms=max(1, round(timeout_s * 1e3))
        )
        with self._lock:
            found = cast(Found, self._exchange(message, Found, time.monotonic() + timeout_s + DEFAULT_TIMEOUT_S))
        return hit_of(found, chain, self._spec)

    def open_handoff(
        self,
        handoff: str,
        chain: Chain,
        tokens: int,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        timeout_s: float = DEFAULT_HANDOFF_TIMEOUT_S,
        servers: Sequence[str] = (),
    ) -> Handoff:
        """This engine is about to compute a prompt for another one: its server keeps room for it, and keeps it.

        Call it before the prompt's first step is opened. Where it is refused the prompt is computed as any other, and
        the other engine computes it too.

        :param handoff: a name that both engines know and nobody else uses.
        :param tokens: of the prompt, that are computed and saved.
        :param lease_s: how long it is kept for a reader, once all of it is stored and after each that came; 0 = as the
            server is configured.
        :param timeout_s: it fails if it is not complete by then.
        :param servers: control addresses of other servers to which workers of this engine are attached: each keeps
            the part of its own workers, and the hand-off is as good as the worst of its parts.
        :raises SessionError: the client was made without a spec.
        """
        if self._spec is None:
            raise SessionError("hand-offs need the model's spec; pass spec= to Control")
        message = opening_of(next(self._ids), handoff, chain, tokens, lease_s, timeout_s, servers)
        try:
            with self._lock:
                answer = self._exchange(message, HandoffState, time.monotonic() + self._lookup_timeout_s)
        except RemoteError as error:
            return Handoff(handoff, "refused", 0, error.message)
        except LayerflowError as error:
            return Handoff(handoff, "unknown", 0, str(error))
        return state_of(cast(HandoffState, answer))

    def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        """The engine computes nothing more of it: it is complete once what it saves is stored.

        :param tokens: that were computed; fewer than it was opened with = it has failed.
        :param reason: why it has failed.
        """
        self._tell(EndHandoff(handoff, tokens, reason))

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        """Nobody needs it any more. Where the server is away it hears of it when this client is next connected.

        The last 4096 are kept for that, for 30 s each; what is given up is logged, and counted as
        :attr:`unheard_releases`.

        :param servers: that keep it, where they are others than this client's own, which tells them.
        """
        with self._lock:
            self._releases.add(ReleaseHandoff(handoff, list(servers)), next(self._ids))
            if self._connection is None and time.monotonic() < self._away_until:
                return
            try:
                self._connected(time.monotonic() + self._lookup_timeout_s, at_once=True)
            except LayerflowError:
                self._drop()
                self._away_until = time.monotonic() + AWAY_S

    def watch_handoff(self, handoff: str, timeout_s: float, *, ended: bool = True) -> Handoff:
        """Wait until a hand-off has ended (or, not `ended`, until it is open); its state after `timeout_s` at most.

        Blocks, and other calls with it.
        """
        number, deadline = next(self._ids), time.monotonic() + timeout_s
        message = WatchHandoff(number, handoff, max(1, round(timeout_s * 1e3)))
        by = deadline + DEFAULT_TIMEOUT_S
        try:
            with self._lock:
                told = state_of(cast(HandoffState, self._exchange(message, HandoffState, by)))
                while ended and told.state not in ENDED and time.monotonic() < deadline:
                    conversation = self._connected(by).conversation
                    told = state_of(cast(HandoffState, conversation.expect(HandoffState, by, number)))
        except LayerflowError as error:
            return Handoff(handoff, "unknown", 0, str(error))
        return told

    def drop_lease(self, request: str) -> None:
        """The request will not be loaded after all. Nothing happens if the server is away: leases expire."""
        with self._lock:
            void, used = self.plans.drop(request)
            self._give_up([(request, number) for number in void])
            self._give_up([(request, 0 if used else -1)])

    def status(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The server's state, as ``layerflow status --json`` prints it.

        :raises LayerflowError: it did not answer.
        """
        return self._ask(StatusRequest(next(self._ids)), timeout_s)

    def purge(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Forget every object of the server's arena; how many there were. What lies behind it stays.

        :raises LayerflowError: the server did not answer.
        """
        return int(self.empty(timeout_s=timeout_s)["purged"])

    def empty(self, *, tier: bool = False, timeout_s: float = PURGE_TIMEOUT_S) -> dict[str, Any]:
        """As :meth:`purge`; with `tier`, also remove what lies in the pool behind the arena, as far as the server can.

        :returns: ``purged`` (objects of the arena), ``revoked`` (on their way from or to the pool behind it), and
            with `tier` and such a pool ``tier``: its ``backend``, how many objects were ``purged`` there, and as
            ``reason`` why others may be left.
        :raises LayerflowError: the server did not answer.
        """
        return self._ask(Purge(next(self._ids), tier), timeout_s)

    def reset(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The engine's weights are being replaced: when this returns, the server loads and publishes nothing of what
        its workers have under way, and its leases are dropped. What is stored stays.

        :returns: how many ``steps`` and ``leases`` there were.
        :raises LayerflowError: the server did not answer.
        """
        return self._ask(Reset(next(self._ids)), timeout_s)

    def close(self) -> None:
        """Hang up; leases expire by themselves."""
        with self._lock:
            self._drop()
            self._releases.close()

    def _tell(self, message: DropLease | EndHandoff) -> None:
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(ServerLost):
                    self._connection.conversation.send(message)

    def _ask(self, message: StatusRequest | Purge | Reset, timeout_s: float) -> dict[str, Any]:
        with self._lock:
            answer = cast(Status, self._exchange(message, Status, time.monotonic() + timeout_s))
        return cast(dict[str, Any], json.loads(answer.json))

    def _exchange(
        self,
        message: Lookup | StatusRequest | Purge | Reset | OpenHandoff | WatchHandoff,
        kind: type[Message],
        deadline: float,
    ) -> ToClient:
        """Ask once; once more over a new connection if a restarted server does not know this client."""
        try:
            return self._ask_once(message, kind, deadline)
        except SessionUnknown:
            self._drop()
            return self._ask_once(message, kind, deadline)
        except RemoteError:
            raise
        except LayerflowError:
            self._drop()
            raise

    def _ask_once(
        self,
        message: Lookup | StatusRequest | Purge | Reset | OpenHandoff | WatchHandoff,
        kind: type[Message],
        deadline: float,
    ) -> ToClient:
        conversation = self._connected(deadline).conversation
        conversation.send(message)
        answer = conversation.expect(kind, deadline, message.id)
        self._releases.heard(message.id)
        return answer

    def _connected(self, deadline: float, *, at_once: bool = False) -> ControlConnection:
        """:param at_once: look now whether the server has hung up."""
        if self._connection is not None and self._connection.hung_up(at_once=at_once):
            self._drop()
        if self._connection is None:
            # However long the answer may take: a server that is there says hello at once.
            by = min(deadline, time.monotonic() + DEFAULT_TIMEOUT_S)
            self._connection = ControlConnection.connect(
                self._context, self._endpoint, self._engine, self._spec, by, keys=self._keys, name=self._name
            )
        self._releases.say(self._connection.conversation, deadline)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.hang_up()
            self._connection = None
            self._releases.interrupted()

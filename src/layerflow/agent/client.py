"""A client of a server: its connection, the questions that it has asked, and what it has still to say.

:class:`ServerClient` waits for nothing but the answers that it is told to wait for. :class:`layerflow.agent.Control`
waits for each answer; :class:`layerflow.agent.lookups.Lookups` asks now and looks later.
"""

from __future__ import annotations

import enum
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import zmq

from layerflow.agent.handshake import ClientKeys, Handshake, dial, fetch_presence
from layerflow.agent.hit_plan import UnusedPlaces
from layerflow.agent.presence import PresenceView, following, hit_of, lookup_of
from layerflow.agent.values import MISS, Follow, Handoff, Hit
from layerflow.errors import DeadlineExceeded, LayerflowError, RemoteError, ServerLost, SessionError
from layerflow.keys import Chain
from layerflow.lives import Life
from layerflow.spec import ModelSpec
from layerflow.system.memfd import SharedMemory
from layerflow.system.numbers import ascending
from layerflow.wire.messages import (
    Attach,
    Bye,
    DropLease,
    EndHandoff,
    Found,
    HandoffState,
    Lookup,
    Missed,
    OpenHandoff,
    Problem,
    Purge,
    ReadChunks,
    RecordRequest,
    ReleaseHandoff,
    Reset,
    StatusRequest,
    ToClient,
    TraceRequest,
    TrySettings,
    WatchHandoff,
    Welcome,
)

DEFAULT_LEASE_S = 0.0
"""How long a hand-off is kept for a reader: as long as the server's ``pd.handoff_lease_s``."""
DEFAULT_HANDOFF_TIMEOUT_S = 60.0
"""How long an engine may take from opening a hand-off until all of it is stored."""
ENDED = ("complete", "failed", "revoked", "released", "refused")

BYE_LINGER_MS = 100
LOOK_S = 0.02
"""How often to look whether the server has hung up: each look lets go of the GIL."""

TELL_S = 1.0
"""How often the server is told of lookups that it was not asked."""

log = structlog.get_logger("layerflow.agent")

# Questions, and what is known of their answers.

Question = (
    Lookup
    | StatusRequest
    | Purge
    | Reset
    | OpenHandoff
    | WatchHandoff
    | RecordRequest
    | TraceRequest
    | TrySettings
    | ReadChunks
)


@dataclass(slots=True, kw_only=True)
class Pending:
    """A question to a server.

    :param until: monotonic seconds: a server that has not answered by then does not.

    :ivar answer: what was last heard; None while nothing was. A lookup keeps its hit alone.
    :ivar error: why there is no answer.
    """

    until: float
    answer: ToClient | None = None
    error: LayerflowError | None = None

    @property
    def answered(self) -> bool:
        """Has the server said something, or never will?"""
        return self.answer is not None or self.error is not None

    @property
    def over(self) -> bool:
        """Is nothing more awaited?"""
        return self.answered


class InquiryState(enum.Enum):
    """What has become of the request that a lookup is for; :data:`INQUIRY_LIFE` says what each means."""

    WANTED = "wanted"
    TAKEN = "taken"
    DROPPED = "dropped"


INQUIRY_LIFE = Life(
    "a lookup",
    {
        InquiryState.WANTED: ("its hit may be loaded yet", (InquiryState.TAKEN, InquiryState.DROPPED)),
        InquiryState.TAKEN: ("its hit went to the workers; an answer that is still to come only brings the lease", ()),
        InquiryState.DROPPED: ("nothing of it is loaded: what an answer leases is given back", ()),
    },
)


@dataclass(slots=True, kw_only=True)
class Inquiry(Pending):
    """A lookup.

    :param asked_at: monotonic seconds.
    :param follow: what it may wait for.

    :ivar hit: the answer's, a miss where there is none; None while it is under way.
    :ivar seen: a hit by the server's table, which stands in for the answer until that comes; None = not used.
    """

    request: str
    chain: Chain
    spec: ModelSpec
    asked_at: float
    follow: Follow | None = None
    state: InquiryState = InquiryState.WANTED
    hit: Hit | None = None
    seen: Hit | None = None

    def enter(self, state: InquiryState) -> None:
        """:raises InvalidTransition: where its life does not allow it."""
        INQUIRY_LIFE.check(self.state, state, f"of {self.request!r}")
        self.state = state

    @property
    def answered(self) -> bool:
        """Is the hit known?"""
        return self.hit is not None

    @property
    def waits(self) -> bool:
        """For a hand-off: the server answers once that is open."""
        return self.follow is not None and bool(self.follow.handoff)


@dataclass(slots=True, kw_only=True)
class HandoffInquiry(Pending):
    """A hand-off that was opened or is watched.

    :param watch: there are answers until its end.
    """

    name: str
    watch: bool = False

    @property
    def over(self) -> bool:
        """Is nothing more awaited?"""
        return self.answered and (self.error is not None or not self.watch or self.state.state in ENDED)

    @property
    def state(self) -> Handoff:
        """Where the hand-off is, as far as anything was heard."""
        if isinstance(self.error, RemoteError):
            return Handoff(self.name, "refused", 0, self.error.message)
        if isinstance(self.answer, HandoffState) and self.error is None:
            told = self.answer
            return Handoff(told.handoff, told.state, told.tokens, told.reason)
        return Handoff(self.name, "unknown", 0, str(self.error or ""))


class ControlConnection:
    """A connection of a client that only looks up, and the server's presence table. For one thread at a time.

    Made by :meth:`connect`.

    :ivar lease_ms: how long the server wants hits to stay leased.
    """

    def __init__(self, conversation: Handshake) -> None:
        self.conversation = conversation
        self.lease_ms = 0
        self._block_tokens = 0
        self._sight: PresenceView | None = None
        self._life = select.poll()
        self._look_at = 0.0
        self._missed = self._missed_tokens = 0
        self._tell_at = 0.0

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        engine: str,
        spec: ModelSpec | None,
        deadline: float,
        *,
        keys: ClientKeys | None = None,
        name: str = "",
    ) -> ControlConnection:
        """Say hello and, with a spec, attach to look up.

        :param deadline: monotonic seconds.
        :raises LayerflowError: the server did not answer by then, or refused.
        """
        line = cls(Handshake(dial(context, endpoint, keys)))
        try:
            welcome = line.conversation.introduce(engine, "control", deadline, name)
            line.lease_ms = welcome.lease_ms
            if spec is not None:
                line._block_tokens = spec.block_tokens
                line._enter(welcome, spec, deadline)
                line.conversation.attach(Attach(spec, memory=False), deadline)
        except LayerflowError:
            line._close(0)
            raise
        return line

    def misses(self, chain: Chain) -> bool:
        """Is nothing of this prompt stored, for certain? Then it counts as a lookup; else ask the server."""
        if self._sight is None or not self._sight.misses(chain):
            return False
        self._missed += 1
        self._missed_tokens += len(chain)
        if time.monotonic() >= self._tell_at:
            self._tell()
        return True

    def hit(self, chain: Chain) -> Hit | None:
        """How much of this prompt is stored, by what can be seen without asking; None: ask the server."""
        return self._sight.hit(chain) if self._sight is not None else None

    def question(
        self, number: int, request: str, chain: Chain, follow: Follow | None = None, compute_s: float | None = None
    ) -> Lookup:
        """How much of this prompt can be loaded, to the block where it may leave what is stored."""
        end = self._sight.end(chain) if self._sight is not None else None
        asked = lookup_of(number, request, chain, lease_ms=self.lease_ms, block_tokens=self._block_tokens, end=end)
        if compute_s:
            asked = msgspec.structs.replace(asked, compute_ms=max(1, round(compute_s * 1e3)))
        return asked if follow is None else following(asked, follow)

    def hung_up(self, *, at_once: bool = False) -> bool:
        """Has the server died? Seen within :data:`LOOK_S`, or `at_once`, where it is on this machine."""
        now = time.monotonic()
        if self.conversation.connection is None or (now < self._look_at and not at_once):
            return False
        self._look_at = now + LOOK_S
        return bool(self._life.poll(0))

    def hang_up(self) -> None:
        """Leave; does not wait."""
        self._tell()
        try:
            self.conversation.send(Bye())
        except ServerLost as error:
            log.debug("goodbye_unheard", error=str(error))
        self._close(BYE_LINGER_MS)

    def _enter(self, welcome: Welcome, spec: ModelSpec, deadline: float) -> None:
        """Fetch the table. Without one everything is asked."""
        if not welcome.fd_server:
            return
        try:
            connection, fd, nbytes = fetch_presence(Path(welcome.fd_server), welcome.token, deadline)
            self.conversation.connection = connection
            self._life.register(connection, select.POLLIN)
            if fd is not None:
                try:
                    self._sight = _map(fd, nbytes, spec)
                finally:
                    os.close(fd)
        except LayerflowError as error:
            log.warning("presence_unavailable", error=str(error))

    def _tell(self) -> None:
        if not self._missed:
            return
        self._tell_at = time.monotonic() + TELL_S
        try:
            self.conversation.send(Missed(self._missed, self._missed_tokens))
        except ServerLost as error:
            log.debug("misses_untold", error=str(error))
        else:
            self._missed = self._missed_tokens = 0

    def _close(self, linger_ms: int) -> None:
        self.conversation.dealer.close(linger=linger_ms)
        if self.conversation.connection is not None:
            self.conversation.connection.close()
        if self._sight is not None:
            self._sight.close()
            self._sight = None


def _map(fd: int, nbytes: int, spec: ModelSpec) -> PresenceView:
    """:raises LayerflowError: it is no table."""
    memory = SharedMemory.attach(fd, nbytes, writable=False)
    try:
        memory.populate()
        return PresenceView(memory, spec)
    except LayerflowError:
        memory.close()
        raise


# Hand-offs that were given back, until the server has heard of it: over the next connection, if this one ends before.
#
# A release has no answer, so that nobody waits for one. The server takes a client's messages in order: an answer to a
# question that was asked later says that it has heard.


MAX_RELEASES = 4096
"""Past so many the oldest is given up."""
KEPT_S = 30.0
"""As long as servers keep a hand-off for a reader by default: its lease has ended it by then."""
LOOK_MS = 20
"""How often a full connection is looked at, while others may add to what is to be said."""


@dataclass(slots=True)
class _Release:
    """A release that the server may not have heard.

    :param until: monotonic seconds; then it is given up.
    :param before: once a question with a larger number is answered, the server has heard the release too.
    :param said: over the present connection.
    """

    message: ReleaseHandoff
    until: float
    before: int
    said: bool = False


class Releases:
    """A client's releases of hand-offs, delivered once a server hears them. Any thread.

    :ivar unheard: how many were given up before they were said.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._releases: dict[str, _Release] = {}
        self.unheard = 0

    def __len__(self) -> int:
        return len(self._releases)

    def add(self, message: ReleaseHandoff, before: int) -> None:
        """Say this next.

        :param before: smaller than the number of each question that is asked from now on.
        """
        now = time.monotonic()
        with self._lock:
            self._releases.pop(message.handoff, None)
            self._releases[message.handoff] = _Release(message, now + KEPT_S, before)
            self._expire(now)
            self._give_up(len(self._releases) - MAX_RELEASES, f"{MAX_RELEASES} newer ones wait")

    def say(self, conversation: Handshake, until: float = 0.0, on_done: Callable[[], None] | None = None) -> None:
        """Say what was not said over this connection; where it is full, the rest next time.

        :param until: monotonic seconds: so long a full connection is waited for.
        :param on_done: called when nothing is left to be said, and before anything is added; or at `until`.
        :raises ServerLost: the connection has ended.
        """
        while True:
            with self._lock:
                self._expire(time.monotonic())
                full = not self._say(conversation)
                if not full or time.monotonic() >= until:
                    if on_done is not None:
                        on_done()
                    return
            conversation.dealer.poll(LOOK_MS, zmq.POLLOUT)

    def acknowledged(self, number: int) -> None:
        """The server has answered a question of this number, which was asked over this connection."""
        with self._lock:
            while self._releases:
                name, oldest = next(iter(self._releases.items()))
                if not oldest.said or oldest.before >= number:
                    return
                del self._releases[name]

    def interrupted(self) -> None:
        """The connection has ended: who knows what the server has heard."""
        with self._lock:
            for release in self._releases.values():
                release.said = False

    def forget(self, name: str) -> None:
        """Forget a hand-off's release: its reader has come for it again."""
        with self._lock:
            self._releases.pop(name, None)

    def close(self) -> None:
        """Give everything up: nobody connects any more."""
        with self._lock:
            self._give_up(len(self._releases), "their engine has hung up")

    def _say(self, conversation: Handshake) -> bool:
        for release in self._releases.values():
            if release.said:
                continue
            if not conversation.dealer.poll(0, zmq.POLLOUT):
                return False
            conversation.send(release.message)
            release.said = True
        return True

    def _expire(self, now: float) -> None:
        over = itertools.takewhile(lambda release: release.until <= now, self._releases.values())
        self._give_up(sum(1 for _ in over), "their leases have ended them by now")

    def _give_up(self, oldest: int, why: str) -> None:
        """Log and count so many releases as given up."""
        names = list(itertools.islice(self._releases, max(0, oldest)))
        unheard = [name for name in names if not self._releases.pop(name).said]
        if unheard:
            self.unheard += len(unheard)
            log.warning("handoffs_not_released", handoffs=len(unheard), first=unheard[0], reason=why)


class ServerClient:
    """Asks a server, and takes its answers when it is pumped. For one thread at a time.

    Without a connection every question fails at once. The owner connects: with :meth:`dial`, on any thread.

    :param engine: identifies the engine whose workers load what this client leases.
    :param name: what that engine is called in status, logs and metrics; "" = `engine`.
    :param spec: needed for lookups.

    :ivar connection: None = there is none.
    :ivar plans: of hits that were told here and are not loaded yet; for any thread.
    :ivar releases: of hand-offs; for any thread.
    """

    def __init__(
        self,
        endpoint: str,
        engine: str,
        spec: ModelSpec | None,
        *,
        name: str = "",
        keys: ClientKeys | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.context = context or zmq.Context.instance()
        self.spec = spec
        self._engine = engine
        self._name = name
        self._keys = keys
        self.connection: ControlConnection | None = None
        self.plans = UnusedPlaces()
        self.releases = Releases()
        self.numbers = ascending()
        self._lookups: dict[int, Inquiry] = {}
        self._asked: dict[int, Pending] = {}  # all other questions

    def dial(self, deadline: float) -> ControlConnection:
        """A new connection, which the owner may make this client's.

        :raises LayerflowError: the server did not answer by then, or refused.
        """
        return ControlConnection.connect(
            self.context, self.endpoint, self._engine, self.spec, deadline, keys=self._keys, name=self._name
        )

    def reachable(self, *, at_once: bool = False) -> ControlConnection | None:
        """The connection, unless the server is seen to have died.

        :param at_once: look now, however short ago the last look was.
        """
        if self.connection is not None and self.connection.hung_up(at_once=at_once):
            self.lost(ServerLost("the server has hung up"))
        return self.connection

    def post(self, pending: Pending, message: Question) -> None:
        """Ask. A question that cannot be asked has failed when this returns."""
        if self.connection is None:
            self.fail(pending, ServerLost("no server is connected"))
            return
        pending.answer = pending.error = None
        if isinstance(pending, Inquiry):
            pending.hit = None
            self._lookups[message.id] = pending
        else:
            self._asked[message.id] = pending
        self.tell(message)

    def tell(self, message: Question | DropLease | EndHandoff) -> None:
        """Send a message; without a connection do nothing."""
        if self.connection is not None:
            try:
                self.connection.conversation.send(message)
            except LayerflowError as error:
                self.lost(error)

    def pump(self, until: float) -> bool:
        """Take one message, or lose the connection. Return False where neither happened by `until`."""
        if self.connection is None:
            return False
        try:
            self._handle(self.connection.conversation.next(until))
        except DeadlineExceeded:
            return False
        except LayerflowError as error:
            self.lost(error)
        return True

    def await_answer(self, pending: Pending, until: float) -> None:
        """Pump until there is an answer, or until `until`."""
        while not pending.answered and self.pump(until):
            pass

    def forget(self, number: int) -> None:
        """Forget a question: nobody waits for what else is answered to it."""
        self._asked.pop(number, None)

    def inquiry(self, request: str, chain: Chain, follow: Follow | None, timeout_s: float) -> Inquiry:
        """A lookup that is about to be asked. A hand-off that it waits for is not released.

        :param timeout_s: the server answers so soon, or so soon after what it may wait for.
        :raises SessionError: the client was made without a spec.
        """
        if self.spec is None:
            raise SessionError("lookups need the model's spec; pass spec= to Control")
        now = time.monotonic()
        inquiry = Inquiry(
            until=now + timeout_s, request=request, chain=chain, spec=self.spec, asked_at=now, follow=follow
        )
        if follow is not None and inquiry.waits:
            inquiry.until = max(now, follow.deadline) + timeout_s
            self.releases.forget(follow.handoff)
        return inquiry

    def opening(
        self, handoff: str, chain: Chain, tokens: int, *, lease_s: float, timeout_s: float, servers: Sequence[str]
    ) -> OpenHandoff:
        """The message that opens a hand-off of a prompt's first `tokens` tokens."""
        lease_ms, timeout_ms = max(0, round(lease_s * 1e3)), max(1, round(timeout_s * 1e3))
        full, rest = divmod(min(tokens, len(chain)), chain.chunk_tokens)
        digests = b"".join(chain.digests[:full])
        tail = chain.partial(full, rest) if rest else b""
        return OpenHandoff(
            next(self.numbers), handoff, chain.parent(0), digests, tokens, tail, lease_ms, timeout_ms, list(servers)
        )

    def watching(self, handoff: str, timeout_s: float) -> WatchHandoff:
        """The message that asks what becomes of a hand-off within `timeout_s`."""
        return WatchHandoff(next(self.numbers), handoff, max(1, round(timeout_s * 1e3)))

    def drop_plan(self, request: str, number: int, lease_ms: int = 0) -> None:
        """Tell the server of a plan that nothing is loaded by; 0 = of none.

        :param lease_ms: its objects may be loaded all the same, for so long.
        """
        if number:
            self.tell(DropLease(request, number, lease_ms))

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded. Without a server its lease expires."""
        revoked, used = self.plans.drop(request)
        self.drop_plan(request, revoked)
        self.tell(DropLease(request, 0 if used else -1))

    def lost(self, error: LayerflowError) -> None:
        """The connection has ended: what is open fails."""
        failed = [*self._lookups.values(), *self._asked.values()]
        self._lookups.clear()
        self._asked.clear()
        for pending in failed:
            self.fail(pending, error)
        self.hang_up()

    def fail(self, pending: Pending, error: LayerflowError) -> None:
        """There is no answer."""
        pending.error = error
        if isinstance(pending, Inquiry):
            pending.hit = MISS
            if isinstance(error, RemoteError):
                log.warning("lookup_refused", request=pending.request, code=error.code, error=error.message)

    def hang_up(self) -> None:
        """Leave, if connected; does not wait."""
        if self.connection is not None:
            self.connection.hang_up()
            self.connection = None
            self.releases.interrupted()

    def close(self) -> None:
        """Leave for good; leases expire by themselves. A release that was sent counts as heard."""
        self.releases.close()
        self.hang_up()

    def _handle(self, message: ToClient) -> None:
        number = getattr(message, "id", -1)
        pending = self._lookups.get(number) or self._asked.get(number)
        if pending is None:
            return
        match message:
            case Problem():
                self.fail(pending, RemoteError(message.code, message.message))
            case Found() if isinstance(pending, Inquiry):
                pending.hit = hit_of(message, pending.chain, pending.spec, pending.follow)
            case _:
                pending.answer, pending.error = message, None
        if pending.over:
            self._lookups.pop(number, None)
            self._asked.pop(number, None)
        if not isinstance(message, Problem):
            self.releases.acknowledged(number)
        if isinstance(message, Found) and isinstance(pending, Inquiry):
            self._settle_plan(pending, message)  # last: what it tells the server may find the connection lost

    def _settle_plan(self, inquiry: Inquiry, found: Found) -> None:
        """Hold the plan for whoever loads the hit, or give up at once a plan that nobody will load by."""
        hit, wanted = inquiry.hit or MISS, inquiry.state is InquiryState.WANTED
        lease_ms = self.connection.lease_ms if self.connection is not None else 0
        if wanted and hit.plan is not None:
            revoked = self.plans.register(inquiry.request, hit.plan, time.monotonic() + lease_ms / 1e3)
            self.drop_plan(inquiry.request, revoked)
        else:
            # Keep the lease of a hit that is only partly resident, and of one that is loaded by what the table showed.
            leased = hit.tokens > 0 if wanted else inquiry.state is InquiryState.TAKEN
            self.drop_plan(inquiry.request, found.plan, lease_ms if leased else 0)
        if wanted and found.tails and not hit.tokens:
            self.drop_lease(inquiry.request)  # of tails that are another prompt's

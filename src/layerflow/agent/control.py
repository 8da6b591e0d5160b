"""The control client: looks up, leases, asks for status. For schedulers and tools; moves no bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from layerflow.agent.client import (
    DEFAULT_HANDOFF_TIMEOUT_S,
    DEFAULT_LEASE_S,
    ControlConnection,
    HandoffInquiry,
    Inquiry,
    InquiryState,
    Pending,
    Question,
    ServerClient,
)
from layerflow.agent.handshake import ClientKeys
from layerflow.agent.presence import lookup_of
from layerflow.agent.values import MISS, Follow, Handoff, Hit
from layerflow.errors import DeadlineExceeded, LayerflowError, RemoteError, SessionError, SessionUnknown
from layerflow.keys import Chain
from layerflow.spec import ModelSpec
from layerflow.wire.messages import (
    ChunkChanges,
    ChunkDescription,
    DescribeChunks,
    EndHandoff,
    Purge,
    ReadChunks,
    RecordRequest,
    ReleaseHandoff,
    Reset,
    Status,
    StatusRequest,
    TraceRequest,
    TrySettings,
)

DEFAULT_LOOKUP_TIMEOUT_S = 0.2
DEFAULT_TIMEOUT_S = 2.0
PURGE_TIMEOUT_S = 15.0
"""Longer than the server waits for the pool behind its arena."""
AWAY_S = 0.5
"""After a lookup without an answer, lookups miss at once for so long instead of waiting again."""


JsonQuestion = StatusRequest | Purge | Reset | RecordRequest | TraceRequest | TrySettings
"""Questions that are answered by JSON."""


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
        self._client = ServerClient(endpoint, engine, spec, name=name, keys=keys, context=context)
        self._lookup_timeout_s = lookup_timeout_s
        self.plans = self._client.plans
        self._lock = threading.Lock()
        self._away_until = 0.0

    @property
    def unheard_releases(self) -> int:
        """Hand-offs that the server was never told to release, for it was away until their leases had ended them."""
        return self._client.releases.unheard

    def connect(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Connect anew, so that the first lookup does not pay for it; False if the server did not answer."""
        with self._lock:
            self._client.hang_up()
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
        inquiry = self._client.inquiry(request, chain, follow, self._lookup_timeout_s)
        # A lookup behind another one that waits for a stopped server waits no longer than for its own answer.
        if not self._lock.acquire(timeout=self._lookup_timeout_s):
            return MISS
        try:
            if time.monotonic() < self._away_until:
                return MISS
            self._look_up(inquiry)
            if inquiry.error is not None and not isinstance(inquiry.error, RemoteError):
                self._away_until = time.monotonic() + AWAY_S
            return inquiry.hit or MISS
        finally:
            self._lock.release()

    def _look_up(self, inquiry: Inquiry) -> None:
        client = self._client
        try:
            connection = self._connected(inquiry.asked_at + self._lookup_timeout_s)
        except LayerflowError as error:
            client.hang_up()
            client.fail(inquiry, error)
            return
        if inquiry.follow is None and connection.misses(inquiry.chain):
            inquiry.hit = MISS
            return
        for request, plan in self.plans.expired(time.monotonic()):
            client.drop_plan(request, plan)
        self._ask(inquiry, connection.question(next(client.numbers), inquiry.request, inquiry.chain, inquiry.follow))

    def written(self, chain: Chain, timeout_s: float) -> Hit:
        """How much of a prompt another node of the pool can load, once nothing of it is on its way there.

        Saves are reported when they are in this server's arena; their writes to the pool behind it may still be going
        on, fail or be shed. To be asked when the saves of a hand-off have been reported; what is missing then never
        comes. Blocks, and other calls with it: a hand-off has a control client of its own.

        :param timeout_s: so long writes are waited for; what is not written by then does not count.
        :raises LayerflowError: the server did not answer.
        """
        message = msgspec.structs.replace(
            lookup_of(next(self._client.numbers), "", chain, lease_ms=1, block_tokens=0),
            written_ms=max(1, round(timeout_s * 1e3)),
        )
        with self._lock:
            inquiry = self._client.inquiry("", chain, None, timeout_s + DEFAULT_TIMEOUT_S)
            inquiry.enter(InquiryState.DROPPED)
            self._ask(inquiry, message)
        if inquiry.error is not None:
            raise inquiry.error
        return inquiry.hit or MISS

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
        if self._client.spec is None:
            raise SessionError("hand-offs need the model's spec; pass spec= to Control")
        message = self._client.opening(handoff, chain, tokens, lease_s=lease_s, timeout_s=timeout_s, servers=servers)
        with self._lock:
            inquiry = HandoffInquiry(until=time.monotonic() + self._lookup_timeout_s, name=handoff)
            self._ask(inquiry, message)
        return inquiry.state

    def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        """The engine computes nothing more of it: it is complete once what it saves is stored.

        :param tokens: that were computed; fewer than it was opened with = it has failed.
        :param reason: why it has failed, or is not opened at all: its readers are told at once.
        """
        with self._lock:
            self._client.tell(EndHandoff(handoff, tokens, reason))

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        """Release a hand-off. A server that is away hears of it when this client is next connected.

        The last 4096 are kept for that, for 30 s each; what is given up is logged, and counted as
        :attr:`unheard_releases`.

        :param servers: that keep it, where they are others than this client's own, which tells them.
        """
        with self._lock:
            client = self._client
            client.releases.add(ReleaseHandoff(handoff, list(servers)), next(client.numbers))
            if client.connection is None and time.monotonic() < self._away_until:
                return
            try:
                self._connected(time.monotonic() + self._lookup_timeout_s, at_once=True)
            except LayerflowError:
                client.hang_up()
                self._away_until = time.monotonic() + AWAY_S

    def watch_handoff(self, handoff: str, timeout_s: float, *, ended: bool = True) -> Handoff:
        """Wait until a hand-off has ended (or, not `ended`, until it is open); its state after `timeout_s` at most.

        Blocks, and other calls with it.
        """
        deadline = time.monotonic() + timeout_s
        message = self._client.watching(handoff, timeout_s)
        inquiry = HandoffInquiry(until=deadline + DEFAULT_TIMEOUT_S, name=handoff, watch=ended)
        with self._lock:
            self._ask(inquiry, message)
            while not inquiry.over and time.monotonic() < deadline:
                if not self._client.pump(inquiry.until):
                    inquiry.error = self._no_answer()
            self._client.forget(message.id)
        return inquiry.state

    def drop_lease(self, request: str) -> None:
        """The request will not be loaded after all. Nothing happens if the server is away: leases expire."""
        with self._lock:
            self._client.drop_lease(request)

    def status(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The server's state, as ``layerflow status --json`` prints it.

        :raises LayerflowError: it did not answer.
        """
        return self._ask_json(StatusRequest(next(self._client.numbers)), timeout_s)

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
        return self._ask_json(Purge(next(self._client.numbers), tier), timeout_s)

    def reset(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The engine's weights are being replaced: when this returns, the server loads and publishes nothing of what
        its workers have under way, and its leases are dropped. What is stored stays.

        :returns: how many ``steps`` and ``leases`` there were.
        :raises LayerflowError: the server did not answer.
        """
        return self._ask_json(Reset(next(self._client.numbers)), timeout_s)

    def record(self, path: Path, seconds: float, max_bytes: int, timeout_s: float = PURGE_TIMEOUT_S) -> dict[str, Any]:
        """Have the server record what happens in it, in a file of its machine.

        :param path: absolute. :param seconds: the recording ends by itself after so long.
        :param max_bytes: size of the file; what is oldest in it is overwritten then.
        :returns: what the server's status says of its recording.
        :raises LayerflowError: the server did not answer, records already, or cannot make the file.
        """
        return self._ask_json(RecordRequest(next(self._client.numbers), str(path), seconds, max_bytes), timeout_s)

    def end_recording(self, timeout_s: float = PURGE_TIMEOUT_S) -> dict[str, Any]:
        """End what :meth:`record` has begun; its file is complete when this returns.

        :raises LayerflowError: the server did not answer, or makes no such recording.
        """
        return self._ask_json(RecordRequest(next(self._client.numbers), ""), timeout_s)

    def trace(self, seconds: float, engine: str = "", timeout_s: float = PURGE_TIMEOUT_S) -> dict[str, Any]:
        """What took time in the last steps of the server's workers, as ``TraceRequest`` of the protocol is answered.

        :param seconds: of steps that ended in the last so many; a worker keeps its last 64 steps.
        :param engine: by its name; "" = of all.
        :raises LayerflowError: the server did not answer, or has no such engine.
        """
        return self._ask_json(TraceRequest(next(self._client.numbers), seconds, engine), timeout_s)

    def try_settings(
        self, content: bytes, seconds: float, *, dry: bool = False, timeout_s: float = PURGE_TIMEOUT_S
    ) -> dict[str, Any]:
        """Have the server hold other settings than its file's, until this client hangs up or says something else.

        :param content: of a configuration file whose live keys differ; empty = the file's own settings.
        :param seconds: they end by themselves after so long; 0 = now.
        :param dry: only say what would change, as ``changes``, and change nothing.
        :returns: what the server's status says of its trial.
        :raises LayerflowError: the server did not answer, follows no file, has another client's trial, or refuses
            the settings; what held before then holds on.
        """
        return self._ask_json(TrySettings(next(self._client.numbers), content, seconds, dry), timeout_s)

    def describe_chunks(self, chunks: Sequence[ChunkDescription], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Say what chunks of this model hold, for engines that tell routers. It is not known whether it was heard.

        :raises VersionMismatch: the server is of a version that has no descriptions.
        :raises LayerflowError: the server is away, or does not read.
        """
        with self._lock:
            try:
                connection = self._connected(time.monotonic() + timeout_s)
                connection.conversation.send(DescribeChunks(list(chunks)))
            except LayerflowError as error:
                self._client.lost(error)
                raise

    def read_chunks(
        self, epoch: int = 0, after: int = 0, begun: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> ChunkChanges:
        """What has changed of the model's described chunks; parameters of the answer before, 0 = there was none.

        :raises VersionMismatch: the server is of a version that keeps no descriptions.
        :raises LayerflowError: the server did not answer.
        """
        with self._lock:
            inquiry = Pending(until=time.monotonic() + timeout_s)
            self._ask(inquiry, ReadChunks(next(self._client.numbers), epoch, after, begun))
        if inquiry.error is not None:
            raise inquiry.error
        return cast(ChunkChanges, inquiry.answer)

    def close(self) -> None:
        """Hang up; leases expire by themselves."""
        with self._lock:
            self._client.close()

    def _ask_json(self, message: JsonQuestion, timeout_s: float) -> dict[str, Any]:
        with self._lock:
            inquiry = Pending(until=time.monotonic() + timeout_s)
            self._ask(inquiry, message)
        if inquiry.error is not None:
            raise inquiry.error
        return cast(dict[str, Any], json.loads(cast(Status, inquiry.answer).json))

    def _ask(self, pending: Pending, message: Question) -> None:
        """Ask, and wait for an answer; once more over a new connection where the server does not know this client."""
        for _ in range(2):
            try:
                self._connected(pending.until)
            except LayerflowError as error:
                self._client.hang_up()
                self._client.fail(pending, error)
            else:
                self._client.post(pending, message)
                self._client.await_answer(pending, pending.until)
                if not pending.answered:
                    self._client.lost(self._no_answer())
            if not isinstance(pending.error, SessionUnknown):
                return

    def _no_answer(self) -> LayerflowError:
        return DeadlineExceeded(f"the server at {self._client.endpoint} did not answer in time; is it running there?")

    def _connected(self, deadline: float, *, at_once: bool = False) -> ControlConnection:
        """:param at_once: look now whether the server has hung up."""
        connection = self._client.reachable(at_once=at_once)
        if connection is None:
            # However long the answer may take: a server that is there says hello at once.
            connection = self._client.dial(min(deadline, time.monotonic() + DEFAULT_TIMEOUT_S))
            self._client.connection = connection
        self._client.releases.say(connection.conversation, deadline)
        return connection

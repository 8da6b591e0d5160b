"""A line to the server for who only looks up: a conversation, its sign of life, and the server's presence table.

The table spares most questions: of a prompt that was never seen nothing is stored, and the table says so in
microseconds, where a lookup is a message there and one back. Of a prompt that was seen it says how much is stored; that
it stays there is the server's to say.
"""

from __future__ import annotations

import bisect
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog
import zmq

from layerflow.agent.handshake import ClientKeys, Handshake, dial, fetch_presence
from layerflow.agent.hit_plan import HitPlan
from layerflow.agent.values import Follow, Handoff, Hit
from layerflow.errors import LayerflowError, ServerLost
from layerflow.hits import HitLength, Tail, find_hit
from layerflow.keys import DIGEST_BYTES, Chain, object_key, several_key
from layerflow.presence import Presence
from layerflow.spec import ModelSpec, Shard
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import (
    Attach,
    Bye,
    Found,
    HandoffState,
    Lookup,
    Missed,
    OpenHandoff,
    ReleaseHandoff,
    TailHit,
    Welcome,
)

# Hand-offs as both engines of one speak of them: the messages, and what a scheduler remembers of its questions.


DEFAULT_LEASE_S = 0.0
"""How long a hand-off is kept for a reader: as long as the server's ``pd.handoff_lease_s``."""
DEFAULT_HANDOFF_TIMEOUT_S = 60.0
"""How long an engine may take from opening a hand-off until all of it is stored."""
ENDED = ("complete", "failed", "revoked", "released", "refused")
SILENT = "the server did not answer"


@dataclass(slots=True)
class HandoffInquiry:
    """A hand-off that was opened or is watched, and what was last heard of it.

    :param until: monotonic seconds: a server that has not answered by then does not.
    :param watch: there are answers until its end.
    :param state: the last answer; None while there is none.
    """

    name: str
    until: float
    watch: bool = False
    state: Handoff | None = None


def opening_of(
    number: int,
    handoff: str,
    chain: Chain,
    tokens: int,
    lease_s: float,
    timeout_s: float,
    servers: Sequence[str] = (),
) -> OpenHandoff:
    """The message that opens a hand-off of a prompt's first `tokens` tokens."""
    lease_ms, timeout_ms = max(0, round(lease_s * 1e3)), max(1, round(timeout_s * 1e3))
    full, rest = divmod(min(tokens, len(chain)), chain.chunk_tokens)
    digests = b"".join(chain.digests[:full])
    tail = chain.partial(full, rest) if rest else b""
    return OpenHandoff(number, handoff, chain.parent(0), digests, tokens, tail, lease_ms, timeout_ms, list(servers))


def following(question: Lookup, follow: Follow) -> Lookup:
    """The question, of a hit that may still be on its way."""
    left_ms = max(1, round((follow.deadline - time.monotonic()) * 1e3))
    return msgspec.structs.replace(question, handoff=follow.handoff, servers=list(follow.servers), follow_ms=left_ms)


def state_of(message: HandoffState) -> Handoff:
    """What the server has told."""
    return Handoff(message.handoff, message.state, message.tokens, message.reason)


BYE_LINGER_MS = 100
LOOK_S = 0.02
"""How often to look whether the server has hung up: each look lets go of the GIL."""

TELL_S = 1.0
"""How often the server is told of lookups that it was not asked."""

MOST_LOOKS = 128
"""Objects of one prompt that are looked for in the table on a scheduler's own thread, some 2 us each."""

log = structlog.get_logger("layerflow.agent")


class PresenceView:
    """What the table tells of one model's prompts.

    :raises LayerflowError: `memory` is no table.
    """

    def __init__(self, memory: SharedMemory, spec: ModelSpec) -> None:
        self._table = Presence(memory)
        self._whole_spec, self._spec = spec, spec.own
        spec = self._spec
        whole = [n for n, group in enumerate(spec.groups) if not (group.rules.windowed or group.rules.exact)]
        self._whole_group = whole[0] if whole else None
        self._shard = spec.shard.peers()[0]
        self._several = several_key(spec.fingerprint)

    def misses(self, chain: Chain) -> bool:
        """Is nothing of this prompt stored, for certain?

        A hit begins with the first chunk, which every group that reads all tokens must have, or with a tail that
        follows nothing. Where no group reads all tokens, a hit may begin anywhere: only the server knows.
        """
        table, group, shard = self._table, self._whole_group, self._shard
        if table.may_hold(self._several):
            return False
        if group is None or (chain.digests and table.may_hold(object_key(chain.digests[0], group, shard))):
            return False
        # As the server looks for tails: under the first group and shard. Of the prompt's own beginnings only those are
        # hashed whose length some stored tail has.
        parent = object_key(chain.parent(0), 0, shard)
        if self._may_share(chain, 0):
            return False
        if not table.may_hold_tails(parent):
            return True
        lengths = table.tail_lengths(parent, min(len(chain), chain.chunk_tokens - 1))
        return not any(table.may_hold(object_key(chain.partial(0, tokens), 0, shard)) for tokens in lengths)

    def end(self, chain: Chain) -> int | None:
        """The chunk with which the prompt leaves what is stored, as far as one sees; None: one cannot see."""
        table, group, shards = self._table, self._whole_group, self._spec.shard.peers()
        if group is None or table.may_hold(self._several):
            return None

        def lacking(digest: bytes) -> bool:
            return not all(table.may_hold(object_key(digest, group, shard)) for shard in shards)

        return bisect.bisect_left(chain.digests, True, key=lacking)

    def _may_share(self, chain: Chain, chunk: int) -> bool:
        """May something be stored that begins with the block behind `chunk` full chunks?"""
        unit = self._spec.block_tokens
        block = chain.block_digests(chunk, unit, unit) if unit else b""
        return bool(block) and self._table.may_hold_block(block)

    def hit(self, chain: Chain) -> Hit | None:
        """The longest hit, by what the table shows now; None: it cannot tell, or the prompt is too long to look.

        It does not show which object has the blocks that a hit could end with: only the server knows that.
        """
        shards = self._spec.shard.peers()
        if self._table.may_hold(self._several):
            return None
        if len(chain.digests) * len(self._whole_spec.groups) * len(shards) > MOST_LOOKS:
            return None
        seen = _SeenKeys(self._table, chain, self._shard)
        found = find_hit(seen, self._whole_spec, chain.parent(0), chain.digests, len(chain), chain.tail)
        hit = hit_of(found, chain, self._spec)
        end = self.end(chain)
        if not seen.sure or (end is not None and self._reach(chain, end) > hit.tokens and self._may_share(chain, end)):
            return None
        return hit

    def _reach(self, chain: Chain, chunk: int) -> int:
        """Tokens of the longest hit that could end at a block of `chunk`."""
        unit, start = self._spec.block_tokens or 1, chunk * chain.chunk_tokens
        return self._spec.usable(start + (len(chain) - start) // unit * unit, len(chain)) or 0

    def close(self) -> None:
        """Unmap."""
        self._table.close()


class _SeenKeys:
    """The table as a hit is searched in it.

    :ivar sure: nothing was looked for that the table cannot tell.
    """

    def __init__(self, table: Presence, chain: Chain, shard: Shard) -> None:
        self._table = table
        self._chain = chain
        self._shard = shard
        self.sure = True

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found = [self._table.holds(key) for key in keys]
        self.sure &= None not in found
        return [there is True for there in found]

    def sharing(self, block: bytes) -> tuple[()]:
        """The table does not show them."""
        return ()

    def tails(self, parent: bytes, most: int, *, undigested: bool) -> list[tuple[int, bytes]]:
        """Those that the prompt itself goes on with."""
        table, chain = self._table, self._chain
        if not table.may_hold_tails(parent):
            return []
        digest = parent[:DIGEST_BYTES]
        chunk = chain.digests.index(digest) + 1 if digest in chain.digests else 0
        return [
            (tokens, object_key(chain.partial(chunk, tokens), 0, self._shard))
            for tokens in table.tail_lengths(parent, min(most, chain.chunk_tokens - 1))
        ]


def hit_of(found: HitLength | Found, chain: Chain, spec: ModelSpec, follow: Follow | None = None) -> Hit:
    """What is stored may be longer than what is the prompt's: only its own tokens tell which of the tails fits."""
    best, ends_in = Hit(found.tokens), -1
    tails: Sequence[Tail | TailHit] = found.tails
    for position, tail in enumerate(tails):
        start, shared = tail.chunk * chain.chunk_tokens, tail.shared
        if start + tail.tokens <= len(chain) and chain.partial(tail.chunk, tail.tokens) == tail.digest:
            shared = tail.tokens
        tokens = spec.usable(start + shared, len(chain)) if shared else None
        if tokens is None or tokens <= best.tokens:
            continue
        ends_in = position
        if shared == tail.tokens:
            best = Hit(tokens, tail.chunk, tail.tokens, tail.digest)
        else:
            digest = chain.partial(tail.chunk, shared)
            best = Hit(tokens, tail.chunk, tail.tokens, tail.digest, shared, digest)
    if found.drafts:
        best = replace(best, drafts=True)
    if not isinstance(found, Found):
        return best
    if found.following or found.reason:
        following = found.following and best.tokens > 0
        until = follow.deadline if following and follow is not None else 0.0
        best = replace(best, following=following, reason=found.reason, until=until)
    plan = HitPlan.of(found, best.tokens, ends_in, spec) if best.tokens else None
    return best if plan is None else replace(best, plan=plan)


def lookup_of(
    number: int, request: str, chain: Chain, lease_ms: int, block_tokens: int, end: int | None = None
) -> Lookup:
    """The question for a prompt.

    :param block_tokens: of the model's spec.
    :param end: the chunk in which the hit may end at a block; None = any.
    """
    digests, first = b"".join(chain.digests), end or 0
    chunks = range(first, len(chain.digests) + 1 if end is None else end + 1)
    blocks = b"".join(chain.block_digests(chunk, block_tokens) for chunk in chunks) if block_tokens else b""
    return Lookup(
        number, request, chain.parent(0), digests, len(chain), lease_ms, chain.tail, 0, blocks, first if blocks else 0
    )


class ControlConnection:
    """Made by :meth:`connect`; for one thread at a time.

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
        asked = lookup_of(number, request, chain, self.lease_ms, self._block_tokens, end)
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
    """:param until: monotonic seconds. :param before: a number: an answer to a question with a larger one says that it
    was heard. :param said: over the connection that there is now."""

    message: ReleaseHandoff
    until: float
    before: int
    said: bool = False


class Releases:
    """Of one client. Any thread.

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

    def say(self, conversation: Handshake, until: float = 0.0, then: Callable[[], None] | None = None) -> None:
        """Say what was not said over this connection; where it is full, the rest next time.

        :param until: monotonic seconds: so long a full connection is waited for.
        :param then: called when nothing is left to be said, and before anything is added; or at `until`.
        :raises ServerLost: the connection has ended.
        """
        while True:
            with self._lock:
                self._expire(time.monotonic())
                full = not self._say(conversation)
                if not full or time.monotonic() >= until:
                    if then is not None:
                        then()
                    return
            conversation.dealer.poll(LOOK_MS, zmq.POLLOUT)

    def heard(self, number: int) -> None:
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
        """Its reader has come for it again."""
        with self._lock:
            self._releases.pop(name, None)

    def close(self) -> None:
        """Nobody connects any more."""
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
        """So many."""
        names = list(itertools.islice(self._releases, max(0, oldest)))
        unheard = [name for name in names if not self._releases.pop(name).said]
        if unheard:
            self.unheard += len(unheard)
            log.warning("handoffs_not_released", handoffs=len(unheard), first=unheard[0], reason=why)

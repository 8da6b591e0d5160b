"""What is stored of a prompt: what the server's presence table shows, what the server is asked, and what it answers.

The table spares most questions: of a prompt that was never seen nothing is stored, and the table says so in
microseconds, where a lookup is a message there and one back. Of a prompt that was seen it says how much is stored; that
it stays there is the server's to say.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from layerflow.agent.hit_plan import PinnedPlaces
from layerflow.agent.values import Follow, Hit
from layerflow.hits import HitLength, Tail, find_hit
from layerflow.keys import DIGEST_BYTES, Chain, object_key, several_key
from layerflow.presence import Presence
from layerflow.spec import ModelSpec, Shard
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import Found, Lookup, TailHit

WITHDRAWN = "what it holds was withdrawn while it was looked up"
"""Why a hand-off that is open is not followed."""

MOST_LOOKS = 128
"""Objects of one prompt that are looked for in the table on a scheduler's own thread, some 2 us each."""


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
        found = find_hit(seen, self._whole_spec, chain.parent(0), chain.digests, len(chain), tail_digest=chain.tail)
        hit = hit_of(found, chain, self._spec)
        end = self.end(chain)
        if not seen.sure or (
            end is not None and self._longest_hit(chain, end) > hit.tokens and self._may_share(chain, end)
        ):
            return None
        return hit

    def _longest_hit(self, chain: Chain, chunk: int) -> int:
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
        """Return the tails that the prompt itself goes on with."""
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
        # A hand-off may be open when it is looked up, and over when its objects are looked for.
        is_lost = found.following and not following and follow is not None and follow.handoff
        best = replace(best, following=following, reason=found.reason or (WITHDRAWN if is_lost else ""), until=until)
    plan = PinnedPlaces.of(found, best.tokens, ends_in, spec) if best.tokens else None
    return best if plan is None else replace(best, plan=plan)


def lookup_of(
    number: int, request: str, chain: Chain, *, lease_ms: int, block_tokens: int, end: int | None = None
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


def following(question: Lookup, follow: Follow) -> Lookup:
    """The question, of a hit that may still be on its way."""
    left_ms = max(1, round((follow.deadline - time.monotonic()) * 1e3))
    return msgspec.structs.replace(question, handoff=follow.handoff, servers=list(follow.servers), follow_ms=left_ms)

"""How many leading tokens of a prompt can be loaded: over all groups, all shards, complete objects only.

A chunk is there where each shard has its object. A group that needs all chunks from the first on bounds the hit by the
first that is missing; from there the search walks back to the first end at which every group has what it needs by its
kind. On its way it gathers tails: stored parts of a chunk that may go on from an end behind that one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from operator import not_
from typing import NamedTuple, Protocol

from layerflow.keys import DIGEST_BYTES, object_key, object_keys
from layerflow.kinds import Kind
from layerflow.spec import ModelSpec

MAX_TAILS = 16
"""Stored tails offered per lookup: more would mean that many prompts differ within one chunk."""

MAX_SHARING = 256
"""How many stored chunks that share the prompt's next block a lookup tries, those that share most first."""

MAX_TAILS_TRIED = 256
"""Stored tails after one chunk that a lookup tries: hundreds of prompts may differ in what follows the same chunk."""

SLICE_KEYS = 1024
"""Keys that :func:`search_hit` looks up between two stops, about half a millisecond's work."""

KEPT_KEYS = 1 << 18
"""Keys that a search keeps for whoever leases its hit; of a longer prompt they are made again."""

LISTED_BYTES = 73
"""What a digest or a key takes in a list, in bytes: 64, and a place of 8 in a list that grows by an eighth."""

COUNT_BYTES = 5
"""What a search keeps of a chunk for each group, in bytes: 4, in an array that grows by a sixteenth."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A longer hit: up to the first `shared` tokens of an object that follows `chunk` chunks.

    Up to all of its `tokens`, if `digest` is that of the prompt's next tokens.
    """

    chunk: int
    tokens: int
    digest: bytes
    shared: int = 0


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """A prompt's digests after each block (:meth:`layerflow.keys.Chain.block_digests`), of some of its chunks.

    :param first: the first of these chunks.
    :param packed: of all their blocks.
    :param count: blocks of a full chunk.
    """

    first: int = 0
    packed: bytes = b""
    count: int = 0

    def of(self, chunk: int) -> bytes:
        """One chunk's; empty: they are not known, or it has no whole block."""
        size = self.count * DIGEST_BYTES
        return (
            self.packed[(chunk - self.first) * size : (chunk - self.first + 1) * size] if chunk >= self.first else b""
        )


NO_BLOCKS = BlockDigests()


@dataclass(frozen=True, slots=True)
class HitLength:
    """The answer: tokens over full chunks, and candidates for more, longest first.

    :param drafts: a draft model's layers are there too, for all of these.
    :param keys: those of the prompt's full chunks that were searched for, by chunk, then by shard; none where there are
        several groups, or more than :data:`KEPT_KEYS`.
    """

    tokens: int
    tails: tuple[Tail, ...]
    drafts: bool = False
    keys: Sequence[bytes] = field(default=(), compare=False, repr=False)

    def ends(self, spec: ModelSpec, prompt: int) -> Iterator[tuple[int, int]]:
        """What a load may read: tokens, and the position of the tail that they end in (-1 = of none).

        :param prompt: its tokens, of which one is left to compute.
        """
        if self.tokens:
            yield self.tokens, -1
        for position, tail in enumerate(self.tails):
            for held in {tail.tokens, tail.shared or tail.tokens}:
                tokens = spec.usable(tail.chunk * spec.chunk_tokens + held, prompt)
                if tokens:
                    yield tokens, position

    def surely(self, spec: ModelSpec, prompt: int) -> int:
        """Tokens over full chunks and shared blocks; a whole tail may add to it."""
        ends = [spec.usable(tail.chunk * spec.chunk_tokens + tail.shared, prompt) or 0 for tail in self.tails]
        return max(self.tokens, *ends) if ends else self.tokens


class LookupSource(Protocol):
    """What a hit is searched in: a pool, a pool with a tier behind it, a table of what a pool holds."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        ...

    def tails(self, parent: bytes, most: int, *, undigested: bool) -> Iterable[tuple[int, bytes]]:
        """Partial chunks that follow the object `parent`, longest first: tokens, and an object's key.

        :param most: tokens that each has at most.
        :param undigested: only those whose block digests are not known; :meth:`sharing` finds the others.
        """
        ...

    def sharing(self, prompt_blocks: bytes) -> Iterable[tuple[int, int, bytes, int]]:
        """Chunks that share leading blocks with a prompt, those that share most first.

        Of those that share as many, the ones that end there go first. Of each is told how many blocks it shares, its
        tokens, an object's key, and its whole blocks.

        :param prompt_blocks: the prompt's block digests.
        """
        ...


def search_bytes(spec: ModelSpec, chunks: int) -> int:
    """What the digests of so many chunks take, and a search for their hit, at most, in bytes."""
    spec = spec.own
    kept = chunks * len(spec.shard.peers()) if _keeps_keys(spec, chunks) else 0
    return (chunks + kept) * LISTED_BYTES + chunks * len(spec.groups) * COUNT_BYTES


def _keeps_keys(spec: ModelSpec, chunks: int) -> bool:
    """Of what is hashed once, dictionaries know the hash. With several groups, keys come by chunk for a lease."""
    return len(spec.groups) == 1 and chunks * len(spec.shard.peers()) <= KEPT_KEYS


def find_hit(
    pool: LookupSource,
    spec: ModelSpec,
    root: bytes,
    digests: list[bytes],
    tokens: int,
    *,
    tail_digest: bytes = b"",
    blocks: BlockDigests = NO_BLOCKS,
) -> HitLength:
    """The longest hit that every group and every shard satisfies, leaving one token to compute.

    Where a group's hits are exact, one that would have to be shortened for that token does not count.

    :param digests: of the prompt's full chunks, in order.
    :param tokens: length of the prompt.
    :param tail_digest: digest of what the full chunks leave of the prompt; empty = nothing, or unknown.
    :param blocks: of the chunk in which the hit may end, or of more.
    """
    search = search_hit(pool, spec, root, digests, tokens, tail_digest=tail_digest, blocks=blocks)
    while True:
        try:
            next(search)
        except StopIteration as stop:
            hit: HitLength = stop.value
            return hit


def search_hit(
    pool: LookupSource,
    spec: ModelSpec,
    root: bytes,
    digests: list[bytes],
    tokens: int,
    *,
    tail_digest: bytes = b"",
    blocks: BlockDigests = NO_BLOCKS,
) -> Generator[None, None, HitLength]:
    """:func:`find_hit` in slices: it stops after every :data:`SLICE_KEYS` keys or so, and returns the hit."""
    whole, spec = spec, spec.own
    rules = [group.rules for group in spec.groups]
    keys, missing = yield from _whole_chunks(pool, spec, digests)
    # A group that needs every chunk from the first on bounds the search for all.
    bound = len(digests)
    for kind, before in zip(rules, missing, strict=True):
        if not kind.first_token(tokens):
            bound = min(bound, bisect_right(before, 0) - 1)
    tails: list[Tail] = []
    tried = 0
    for chunk in range(bound, -1, -1):
        parent = digests[chunk - 1] if chunk else root
        room = tokens - chunk * spec.chunk_tokens
        tried += len(rules)

        def fits(held: int, shared: int, chunk: int = chunk) -> bool:
            hit = _usable(spec, chunk * spec.chunk_tokens, held, tokens, shared)
            return hit is not None and _satisfied(rules, missing, spec.chunk_tokens, hit, upto=chunk)

        for shared, tail in islice(_best(pool, spec, blocks.of(chunk), room, fits), MAX_TAILS - len(tails)):
            tried += len(rules) * len(spec.shard.peers())
            tails.append(Tail(chunk, *tail, shared))
        offered = {tail.digest for tail in tails}
        # The prompt's block digests find those that begin as it does: no other need be looked at.
        undigested = bool(blocks.of(chunk))
        for tail, stored in _tails(
            pool,
            spec,
            parent,
            room=room,
            tail_digest=tail_digest if chunk == len(digests) else b"",
            undigested=undigested,
        ):
            tried += len(rules) * len(spec.shard.peers())
            if tried >= SLICE_KEYS:
                yield
                tried = 0
            if len(tails) >= MAX_TAILS:
                break
            if stored and tail[1] not in offered and fits(tail[0], 0):
                tails.append(Tail(chunk, *tail))
        if tried >= SLICE_KEYS:
            yield
            tried = 0
        hit = _usable(spec, (chunk - 1) * spec.chunk_tokens, spec.chunk_tokens, tokens) if chunk else 0
        if hit and _satisfied(rules, missing, spec.chunk_tokens, hit, upto=chunk):
            break
    else:
        hit = 0
    found = HitLength(hit, tuple(tails))
    return replace(found, drafts=(yield from _has_drafts(pool, whole, digests, found, tokens)), keys=keys)


def _has_drafts(
    pool: LookupSource, spec: ModelSpec, digests: list[bytes], hit: HitLength, tokens: int
) -> Generator[None, None, bool]:
    """Is all there that a load of this hit or of any of its tails reads of the draft model's groups? In slices."""
    if not spec.shard.drafts or not (hit.tokens or hit.tails):
        return False
    shards = spec.shard.peers()
    step = max(1, SLICE_KEYS // len(shards))
    for group in range(len(spec.own.groups), len(spec.groups)):
        chunks = _needed_chunks(spec, digests, hit, tokens, group)
        for first in range(0, len(chunks), step):
            yield
            if not all(pool.lookup(object_keys(chunks[first : first + step], (group,), shards))):
                return False
    return True


def needed_keys(
    spec: ModelSpec, digests: list[bytes], hit: HitLength, tokens: int, groups: Iterable[int]
) -> set[bytes]:
    """What a load of this hit or of any of its tails reads of these groups, of all shards.

    :param tokens: of the prompt, of which one is left to compute.
    """
    keys: set[bytes] = set()
    for group in groups:
        keys.update(object_keys(_needed_chunks(spec, digests, hit, tokens, group), (group,), spec.shard.peers()))
    return keys


def _needed_chunks(spec: ModelSpec, digests: list[bytes], hit: HitLength, tokens: int, group: int) -> list[bytes]:
    """The digests of the chunks, full or partial, of which a load of this hit or of any of its tails reads a group.

    Each once: most ends need nearly the same chunks.
    """
    spans: list[tuple[int, int]] = []
    tails: dict[bytes, None] = {}
    for end, position in hit.ends(spec, tokens):
        need = spec.groups[group].rules.need(end, spec.chunk_tokens)
        tail = hit.tails[position] if position >= 0 else None
        if tail is not None and tail.chunk in need:
            tails[tail.digest] = None
        spans.append((need.start, need.stop if tail is None else min(need.stop, tail.chunk)))
    chunks: list[bytes] = []
    done = 0
    for start, stop in sorted(spans):
        chunks += digests[max(start, done) : stop]
        done = max(done, stop)
    return [*chunks, *tails]


def _usable(spec: ModelSpec, start: int, held: int, tokens: int, shared: int = 0) -> int | None:
    """Return of how many tokens a hit is that ends in an object of `held` tokens after `start`; None = of none.

    :param shared: of these, the prompt's; 0 = all.
    """
    hit = spec.usable(start + (shared or held), tokens)
    if hit is None or hit <= start or not spec.inside(held, hit - start):
        return None
    return hit


def _whole_chunks(
    pool: LookupSource, spec: ModelSpec, digests: list[bytes]
) -> Generator[None, None, tuple[list[bytes], list[array[int]]]]:
    """The keys by chunk and shard, as far as they are kept; and per group, how many of the first n chunks are missing.

    A chunk is missing where a shard lacks its object. Whether a range of chunks is whole is one subtraction.
    """
    shards = spec.shard.peers()
    count, step = len(shards), max(1, SLICE_KEYS // len(shards))
    keeps = _keeps_keys(spec, len(digests))
    keys: list[bytes] = []
    missing: list[array[int]] = []
    for group in range(len(spec.groups)):
        before = array("I", (0,))
        for first in range(0, len(digests), step):
            if missing or first:
                yield
            few = object_keys(digests[first : first + step], (group,), shards)
            if keeps:
                keys += few
            whole = map(all, zip(*[iter(pool.lookup(few))] * count, strict=True))
            before.extend(accumulate(map(not_, whole), initial=before.pop()))
        missing.append(before)
    return keys, missing


class _Sharing(NamedTuple):
    """A stored chunk that begins as the prompt's next.

    :param shared: tokens. :param whole: all of its tokens may be the prompt's.
    """

    shared: int
    whole: bool
    tokens: int
    digest: bytes


def _sharing(pool: LookupSource, spec: ModelSpec, prompt_blocks: bytes, room: int) -> Iterator[_Sharing]:
    """Stored chunks that begin as the prompt's next: those that share most first, and of these those that end there.

    :param prompt_blocks: the prompt's next block digests.
    :param room: its tokens that are left.
    """
    for count, tokens, key, theirs in islice(pool.sharing(prompt_blocks), MAX_SHARING) if prompt_blocks else ():
        shared = count * spec.block_tokens
        whole = count == theirs and shared < tokens <= room
        if whole or spec.inside(tokens, shared):
            yield _Sharing(shared, whole, tokens, key[:DIGEST_BYTES])


def sharing_chunks(
    pool: LookupSource, spec: ModelSpec, digests: Sequence[bytes], tokens: int, blocks: BlockDigests
) -> Generator[None, None, list[bytes]]:
    """Digests of other chunks that share blocks with the prompt's: of each of its chunks the two that share most."""
    spec = spec.own
    found: dict[bytes, None] = {}
    for chunk in range(len(digests) + 1):
        if chunk % (SLICE_KEYS // 8) == SLICE_KEYS // 8 - 1:
            yield
        best = list(islice(_sharing(pool, spec, blocks.of(chunk), tokens - chunk * spec.chunk_tokens), 2))
        if best and not (chunk < len(digests) and best[0].digest == digests[chunk]):
            found |= dict.fromkeys(each.digest for each in best)
    return list(found)


def _best(
    pool: LookupSource,
    spec: ModelSpec,
    prompt_blocks: bytes,
    room: int,
    fits: Callable[[int, int], bool],
) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Return of :func:`_sharing` what every group and shard has: one that shares most, and others that may do better.

    Yields tokens shared (0: the object serves a hit as a whole alone), and tokens and digest.

    :param fits: whether a hit may end in an object of so many tokens, of which so many (0 = all) are the prompt's.
    """
    best = 0
    for shared, whole, tokens, digest in _sharing(pool, spec, prompt_blocks, room):
        if best and shared < best:
            return
        if best and not whole:
            continue
        inside = shared if spec.inside(tokens, shared) and fits(tokens, shared) else 0
        if (inside or (whole and fits(tokens, 0))) and all(pool.lookup(_keys(spec, digest))):
            best = inside or best
            yield inside, (tokens, digest)


def _keys(spec: ModelSpec, digest: bytes) -> list[bytes]:
    """A chunk's objects, of every group and shard."""
    return object_keys((digest,), range(len(spec.groups)), spec.shard.peers())


def _tails(
    pool: LookupSource, spec: ModelSpec, parent: bytes, *, room: int, tail_digest: bytes, undigested: bool
) -> Iterator[tuple[tuple[int, bytes], bool]]:
    """Tails after `parent` of at most `room` tokens, longest first, and whether every group and shard has them.

    :param undigested: none whose block digests are known.
    :param tail_digest: the prompt's own of exactly `room` tokens, which a pool may hold without listing it.
    """
    found = pool.tails(object_key(parent, 0, spec.shard.peers()[0]), room, undigested=undigested)
    # Taken at once: what is stored may change between two of them.
    listed = [(tokens, key[:DIGEST_BYTES]) for tokens, key in islice(found, MAX_TAILS_TRIED)]
    for tail in dict.fromkeys([(room, tail_digest), *listed] if tail_digest and room else listed):
        yield tail, all(pool.lookup(_keys(spec, tail[1])))


def _satisfied(rules: list[Kind], missing: Sequence[Sequence[int]], chunk_tokens: int, hit: int, upto: int) -> bool:
    """Do the full chunks below `upto` that a hit of `hit` tokens needs exist in every group?

    :param missing: per group, how many of the first n chunks do not.
    """
    for kind, before in zip(rules, missing, strict=True):
        need = kind.need(hit, chunk_tokens)
        if before[max(min(need.stop, upto), need.start)] - before[need.start]:
            return False
    return True

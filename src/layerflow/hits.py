"""How many leading tokens of a prompt can be loaded: over all groups, all shards, complete objects only."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

from layerflow.keys import DIGEST_BYTES, object_key
from layerflow.kinds import Kind
from layerflow.spec import ModelSpec

MAX_TAILS = 16
"""Stored tails offered per lookup: more would mean that many prompts differ within one chunk."""


MAX_TAILS_TRIED = 256
"""Stored tails after one chunk that a lookup tries: hundreds of prompts may differ in what follows the same chunk."""

SLICE_KEYS = 1024
"""Keys that :func:`search_hit` looks up between two stops, about half a millisecond's work."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A longer hit, valid if `digest` is that of the prompt's next `tokens` tokens after `chunk` chunks."""

    chunk: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HitLength:
    """The answer: tokens over full chunks, and candidates for more, longest first."""

    tokens: int
    tails: tuple[Tail, ...]


class LookupSource(Protocol):
    """What a hit is searched in: a pool, a pool with a tier behind it, a table of what a pool holds."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        ...

    def tails(self, parent: bytes) -> Sequence[tuple[int, bytes]]:
        """Partial chunks that follow the object `parent`, longest first: tokens, and an object's key."""
        ...


def find_hit(
    pool: LookupSource, spec: ModelSpec, root: bytes, digests: list[bytes], tokens: int, own: bytes = b""
) -> HitLength:
    """The longest hit that every group and every shard satisfies, leaving one token to compute.

    Where a group's hits are exact, one that would have to be shortened for that token does not count.

    :param digests: of the prompt's full chunks, in order.
    :param tokens: length of the prompt.
    :param own: digest of what the full chunks leave of the prompt; empty = nothing, or unknown.
    """
    search = search_hit(pool, spec, root, digests, tokens, own)
    while True:
        try:
            next(search)
        except StopIteration as stop:
            hit: HitLength = stop.value
            return hit


def search_hit(
    pool: LookupSource, spec: ModelSpec, root: bytes, digests: list[bytes], tokens: int, own: bytes = b""
) -> Generator[None, None, HitLength]:
    """:func:`find_hit` in slices: it stops after every :data:`SLICE_KEYS` keys or so, and returns the hit."""
    rules = [group.rules for group in spec.groups]
    present = yield from _presence(pool, spec, digests)
    # A group that needs every chunk from the first on bounds the search for all.
    bound = len(digests)
    for kind, row in zip(rules, present, strict=True):
        if False in row and not kind.first_token(tokens):
            bound = min(bound, row.index(False))
    # Per group, how many of the first n chunks are missing: whether a range is whole is then one subtraction.
    missing = [list(accumulate((not there for there in row), initial=0)) for row in present]
    tails: list[Tail] = []
    tried = 0
    for chunk in range(bound, -1, -1):
        parent = digests[chunk - 1] if chunk else root
        room = tokens - chunk * spec.chunk_tokens
        tried += len(rules)
        for tail, whole in _tails(pool, spec, parent, room, own if chunk == len(digests) else b""):
            tried += len(rules) * len(spec.shard.peers())
            if tried >= SLICE_KEYS:
                yield
                tried = 0
            if len(tails) == MAX_TAILS:
                break
            hit = _usable(spec, chunk * spec.chunk_tokens, tail[0], tokens) if whole else None
            if hit is not None and _satisfied(rules, missing, spec.chunk_tokens, hit, upto=chunk):
                tails.append(Tail(chunk, *tail))
        if tried >= SLICE_KEYS:
            yield
            tried = 0
        hit = _usable(spec, (chunk - 1) * spec.chunk_tokens, spec.chunk_tokens, tokens) if chunk else 0
        if hit and _satisfied(rules, missing, spec.chunk_tokens, hit, upto=chunk):
            return HitLength(hit, tuple(tails))
    return HitLength(0, tuple(tails))


def _usable(spec: ModelSpec, start: int, held: int, tokens: int) -> int | None:
    """Of how many tokens is a hit that ends in an object of `held` tokens after `start` ones? None = of none."""
    hit = spec.usable(start + held, tokens)
    if hit is None or hit <= start or not all(group.rules.inside(held, hit - start) for group in spec.groups):
        return None
    return hit


def _presence(pool: LookupSource, spec: ModelSpec, digests: list[bytes]) -> Generator[None, None, list[list[bool]]]:
    """Per group: by chunk, whether every shard has the object."""
    shards = spec.shard.peers()
    count, step = len(shards), max(1, SLICE_KEYS // len(shards))
    rows: list[list[bool]] = []
    for group in range(len(spec.groups)):
        row: list[bool] = []
        for first in range(0, len(digests), step):
            if rows or first:
                yield
            few = digests[first : first + step]
            found = pool.lookup([object_key(digest, group, shard) for digest in few for shard in shards])
            row += found if count == 1 else [all(found[at : at + count]) for at in range(0, len(found), count)]
        rows.append(row)
    return rows


def _tails(
    pool: LookupSource, spec: ModelSpec, parent: bytes, room: int, own: bytes
) -> Iterator[tuple[tuple[int, bytes], bool]]:
    """Tails after `parent` of at most `room` tokens, longest first, and whether every group and shard has them.

    :param own: the prompt's own of exactly `room` tokens, which a pool may hold without listing it.
    """
    shards = spec.shard.peers()
    listed = [(tokens, key[:DIGEST_BYTES]) for tokens, key in pool.tails(object_key(parent, 0, shards[0]))]
    fitting = (tail for tail in dict.fromkeys([(room, own), *listed] if own and room else listed) if tail[0] <= room)
    for tail in islice(fitting, MAX_TAILS_TRIED):
        keys = [object_key(tail[1], group, shard) for group in range(len(spec.groups)) for shard in shards]
        yield tail, all(pool.lookup(keys))


def _satisfied(rules: list[Kind], missing: list[list[int]], chunk_tokens: int, hit: int, upto: int) -> bool:
    """Do the full chunks below `upto` that a hit of `hit` tokens needs exist in every group?

    :param missing: per group, how many of the first n chunks do not.
    """
    for kind, before in zip(rules, missing, strict=True):
        need = kind.need(hit, chunk_tokens)
        if before[max(min(need.stop, upto), need.start)] - before[need.start]:
            return False
    return True

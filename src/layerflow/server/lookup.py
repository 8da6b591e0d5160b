"""Lookups over the arena and what lies behind it: what is there, and what to bring for a hit."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerflow.hits import SLICE_KEYS, HitLength, search_hit
from layerflow.keys import object_key
from layerflow.objects import object_bytes
from layerflow.pool import base
from layerflow.pool.base import NewObject, Pool
from layerflow.spec import ModelSpec, Shard

if TYPE_CHECKING:
    from layerflow.server.tier.tier import Tier


@dataclass(frozen=True, slots=True)
class TieredLookup:
    """The arena and the tier behind it, as one.

    :param found: what the tier was asked for and has.
    :param unavailable: what the tier has and cannot be brought now.
    """

    pool: Pool
    tier: Tier
    found: frozenset[bytes] = frozenset()
    unavailable: frozenset[bytes] = frozenset()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        here, behind = self.pool.lookup(keys), self.tier.holds(keys)
        found, unavailable = self.found, self.unavailable
        return [
            arena or ((tier or key in found) and key not in unavailable)
            for key, arena, tier in zip(keys, here, behind, strict=True)
        ]

    def tails(self, parent: bytes) -> list[base.Tail]:
        """Partial chunks that follow `parent`, longest first."""
        found = {*self.pool.tails(parent), *self.tier.tails(parent)}
        return sorted(found, key=lambda tail: (-tail.tokens, tail.key))


@dataclass(frozen=True, slots=True)
class TierLookup:
    """The tier alone, for workers whose bytes do not pass through the arena; parameters as of :class:`TieredLookup`."""

    tier: Tier
    found: frozenset[bytes] = frozenset()
    unavailable: frozenset[bytes] = frozenset()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        found, unavailable = self.found, self.unavailable
        held = self.tier.holds(keys)
        return [(tier or key in found) and key not in unavailable for key, tier in zip(keys, held, strict=True)]

    def tails(self, parent: bytes) -> list[base.Tail]:
        """Partial chunks that follow `parent`, longest first."""
        return sorted(self.tier.tails(parent), key=lambda tail: (-tail.tokens, tail.key))


def hit_keys(spec: ModelSpec, digests: list[bytes], hit: HitLength) -> Iterator[list[bytes]]:
    """Everything that a load of this hit (or of one of its tails) would read, there or not, in slices."""
    reach = max((tail.chunk * spec.chunk_tokens for tail in hit.tails), default=0)
    chunks = digests[: -(-max(hit.tokens, reach) // spec.chunk_tokens)]
    wanted = [*chunks, *(tail.digest for tail in hit.tails)]
    groups, shards = range(len(spec.groups)), spec.shard.peers()
    step = max(1, SLICE_KEYS // (len(groups) * len(shards)))
    for first in range(0, len(wanted), step):
        few = wanted[first : first + step]
        yield [object_key(digest, group, shard) for digest in few for group in groups for shard in shards]


def stored_object(spec: ModelSpec, group: int, key: bytes, tokens: int = 0, parent: bytes = b"") -> NewObject:
    """The shape of a stored object.

    :param tokens: of a partial chunk; 0 = a full one.
    :param parent: 24-byte key before a partial chunk.
    """
    tokens = tokens or spec.chunk_tokens
    blocks = len(spec.groups[group].rules.keep(tokens))
    return NewObject(key, object_bytes(spec.groups[group], blocks), blocks, tokens, parent)


def unknown_keys(
    pool: Pool, tier: Tier, spec: ModelSpec, digests: Sequence[bytes], *, direct: bool = False
) -> Generator[None, None, list[bytes]]:
    """Objects of these chunks, full or partial, of all groups and shards, that only the tier can tell of.

    In slices, as :func:`layerflow.hits.search_hit`.

    :param direct: for workers to whom the arena does not matter.
    """
    shards = spec.shard.peers()
    known, step = TierLookup(tier) if direct else TieredLookup(pool, tier), max(1, SLICE_KEYS // len(shards))
    unknown: list[bytes] = []
    for group in range(len(spec.groups)):
        for first in range(0, len(digests), step):
            if group or first:
                yield
            keys = [object_key(digest, group, shard) for digest in digests[first : first + step] for shard in shards]
            unknown += [key for key, there in zip(keys, known.lookup(keys), strict=True) if not there]
    return unknown


def find_and_bring(
    pool: Pool,
    tier: Tier,
    spec: ModelSpec,
    shards: Sequence[Shard],
    prompt: tuple[bytes, list[bytes], int, bytes],
    found: frozenset[bytes],
    *,
    direct: bool = False,
) -> Generator[None, None, HitLength]:
    """The longest hit in arena and tier together; what it needs is on its way into the arena. In slices, as above.

    Stored tails are brought by the step that loads them: most of those offered belong to other prompts.

    :param shards: whose objects this machine's workers load; of the others it suffices that they exist.
    :param prompt: root digest, digests of the full chunks, tokens, and the digest of its last, partial chunk.
    :param found: keys that the tier was asked for and has.
    :param direct: some workers read the tier themselves: what only the arena has is no hit.
    """
    root, digests, tokens, own = prompt
    unavailable: frozenset[bytes] = frozenset()
    while True:
        there = TierLookup(tier, found, unavailable) if direct else TieredLookup(pool, tier, found, unavailable)
        hit = yield from search_hit(there, spec, root, digests, tokens, own)
        stuck = yield from _bring(pool, tier, spec, shards, digests, hit.tokens)
        if not stuck:
            return hit
        unavailable |= stuck  # no room in the arena, or it left the tier since: a shorter hit


def _bring(
    pool: Pool, tier: Tier, spec: ModelSpec, shards: Sequence[Shard], digests: list[bytes], hit: int
) -> Generator[None, None, frozenset[bytes]]:
    """Start fetching the full chunks that a hit needs; those that cannot be fetched."""
    stuck: set[bytes] = set()
    for number, group in enumerate(spec.groups):
        need = group.rules.need(hit, spec.chunk_tokens) if hit else range(0)
        chunks = digests[need.start : need.stop]
        keys = [object_key(digest, number, shard) for digest in chunks for shard in shards]
        missing = [key for key, there in zip(keys, pool.lookup(keys), strict=True) if not there]
        if missing:
            tier.bring([stored_object(spec, number, key) for key in missing], len(group.layers))
            stuck.update(key for key in missing if tier.coming(key) is None)
        yield
    return frozenset(stuck)

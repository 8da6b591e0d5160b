"""What lookups search beyond the pool itself, and what a hit's lease covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerflow.hits import HitLength
from layerflow.keys import object_key
from layerflow.pool import base
from layerflow.pool.base import Pool
from layerflow.spec import ModelSpec

if TYPE_CHECKING:
    from layerflow.server.tier import Tier


@dataclass(frozen=True, slots=True)
class Both:
    """The arena and the tier behind it, as one.

    :param found: what the tier was asked for and has.
    :param barred: what the tier has and cannot be brought now.
    """

    pool: Pool
    tier: Tier
    found: frozenset[bytes] = frozenset()
    barred: frozenset[bytes] = frozenset()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        here, behind = self.pool.lookup(keys), self.tier.holds(keys)
        found, barred = self.found, self.barred
        return [
            arena or ((tier or key in found) and key not in barred)
            for key, arena, tier in zip(keys, here, behind, strict=True)
        ]

    def tails(self, parent: bytes) -> list[base.Tail]:
        """Partial chunks that follow `parent`, longest first."""
        found = {*self.pool.tails(parent), *self.tier.tails(parent)}
        return sorted(found, key=lambda tail: (-tail.tokens, tail.key))


@dataclass(frozen=True, slots=True)
class Behind:
    """The tier alone, for workers whose bytes do not pass through the arena; parameters as of :class:`Both`."""

    tier: Tier
    found: frozenset[bytes] = frozenset()
    barred: frozenset[bytes] = frozenset()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects can be loaded."""
        found, barred = self.found, self.barred
        held = self.tier.holds(keys)
        return [(tier or key in found) and key not in barred for key, tier in zip(keys, held, strict=True)]

    def tails(self, parent: bytes) -> list[base.Tail]:
        """Partial chunks that follow `parent`, longest first."""
        return sorted(self.tier.tails(parent), key=lambda tail: (-tail.tokens, tail.key))


def hit_keys(spec: ModelSpec, digests: list[bytes], hit: HitLength) -> list[bytes]:
    """Everything that a load of this hit (or of one of its tails) would read, there or not."""
    reach = max((tail.chunk * spec.chunk_tokens for tail in hit.tails), default=0)
    chunks = digests[: -(-max(hit.tokens, reach) // spec.chunk_tokens)]
    return [
        object_key(digest, group, shard)
        for digest in [*chunks, *(tail.digest for tail in hit.tails)]
        for group in range(len(spec.groups))
        for shard in spec.shard.peers()
    ]

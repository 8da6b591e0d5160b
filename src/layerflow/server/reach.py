"""Lookups that reach past the arena: what to ask the tier, and what to bring for a hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerflow.hits import HitLength, find_hit
from layerflow.keys import object_key
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, Pool
from layerflow.server.lookup import Behind, Both
from layerflow.spec import ModelSpec, Shard

if TYPE_CHECKING:
    from layerflow.server.tier import Tier


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
) -> list[bytes]:
    """Objects of these chunks, full or partial, of all groups and shards, that only the tier can tell of.

    :param direct: for workers to whom the arena does not matter.
    """
    shards = spec.shard.peers()
    keys = [
        object_key(digest, group, shard) for group in range(len(spec.groups)) for digest in digests for shard in shards
    ]
    known = (Behind(tier) if direct else Both(pool, tier)).lookup(keys)
    return [key for key, there in zip(keys, known, strict=True) if not there]


def find_and_bring(
    pool: Pool,
    tier: Tier,
    spec: ModelSpec,
    shards: Sequence[Shard],
    prompt: tuple[bytes, list[bytes], int, bytes],
    found: frozenset[bytes],
    engine: str,
    *,
    direct: bool = False,
) -> HitLength:
    """The longest hit in arena and tier together; what it needs is on its way into the arena.

    Stored tails are brought by the step that loads them: most of those offered belong to other prompts.

    :param shards: whose objects this machine's workers load; of the others it suffices that they exist.
    :param prompt: root digest, digests of the full chunks, tokens, and the digest of its last, partial chunk.
    :param found: keys that the tier was asked for and has.
    :param engine: for whom.
    :param direct: some workers read the tier themselves: what only the arena has is no hit.
    """
    root, digests, tokens, own = prompt
    barred: frozenset[bytes] = frozenset()
    while True:
        there = Behind(tier, found, barred) if direct else Both(pool, tier, found, barred)
        hit = find_hit(there, spec, root, digests, tokens, own)
        stuck = _bring(pool, tier, spec, shards, digests, hit.tokens, engine)
        if not stuck:
            return hit
        barred |= stuck  # no room in the arena, or it left the tier since: a shorter hit


def _bring(
    pool: Pool, tier: Tier, spec: ModelSpec, shards: Sequence[Shard], digests: list[bytes], hit: int, engine: str
) -> frozenset[bytes]:
    """Start fetching the full chunks that a hit needs; those that cannot be fetched."""
    stuck: set[bytes] = set()
    for number, group in enumerate(spec.groups):
        need = group.rules.need(hit, spec.chunk_tokens) if hit else range(0)
        chunks = digests[need.start : need.stop]
        keys = [object_key(digest, number, shard) for digest in chunks for shard in shards]
        missing = [key for key, there in zip(keys, pool.lookup(keys), strict=True) if not there]
        if missing:
            tier.bring([stored_object(spec, number, key) for key in missing], group.layers, engine)
            stuck.update(key for key in missing if tier.coming(key) is None)
    return frozenset(stuck)

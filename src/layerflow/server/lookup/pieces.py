"""Objects of other partitions behind the arena: brought into it before a hit that they cover is told."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from layerflow.boxes import Box
from layerflow.hits import HitLength
from layerflow.keys import DIGEST_BYTES, object_keys
from layerflow.objects import HEADER_BYTES, layer_bytes
from layerflow.pool.base import Covering, NewObject, Pool
from layerflow.spec import ModelSpec

if TYPE_CHECKING:
    from layerflow.server.sources import Sources

MOST_TAILS = 2
"""Of so many tails of a hit, the longest, pieces are brought."""


def bring_pieces(
    pool: Pool,
    tier: Sources,
    spec: ModelSpec,
    covering: Covering,
    prompt: tuple[bytes, Sequence[bytes]],
    hit: HitLength,
    found: frozenset[bytes],
    engine: str,
) -> Generator[None, None, set[bytes]]:
    """Start fetching the objects of other partitions that a hit needs; those that are on their way. In slices.

    A step cannot wait for pieces of a block, each of other layers and heads, as it waits for whole objects; so a hit
    counts them once they are in the arena.

    :param prompt: root digest, and digests of the full chunks.
    :param hit: over what arena and tier have, of all partitions.
    :param found: keys that the tier was asked for and has.
    """
    root, digests = prompt
    coming: set[bytes] = set()
    for number, group in enumerate(spec.groups):
        need = group.rules.need(hit.tokens, spec.chunk_tokens) if hit.tokens else range(0)
        wanted = [(digest, spec.chunk_tokens, b"") for digest in digests[need.start : need.stop]]
        for tail in islice(hit.tails, MOST_TAILS):
            # A hit that goes on into a tail may need chunks before it that the shorter hit does not.
            need = group.rules.need(tail.chunk * spec.chunk_tokens + (tail.shared or tail.tokens), spec.chunk_tokens)
            wanted += [(digest, spec.chunk_tokens, b"") for digest in digests[need.start : min(need.stop, tail.chunk)]]
            before = digests[tail.chunk - 1] if tail.chunk else root
            wanted.append((tail.digest, tail.tokens, before if tail.tokens < spec.chunk_tokens else b""))
        pieces: dict[tuple[int, int], dict[bytes, NewObject]] = {}
        for digest, tokens, parent in dict.fromkeys(wanted):
            keys = object_keys((digest,), (number,), spec.shard.peers())
            for told, source in _lacking(pool, tier, covering, keys, found):
                box = told.of_layers(spec.depth_of(number))
                new = _piece(spec, number, box, source, tokens, parent)
                pieces.setdefault((box.first_layer, box.end_layer), {})[source] = new
        for (first, end), objects in pieces.items():
            # The group's own numbers where it has as many layers, so that an equal worker's step can use them too.
            layers = group.layers if end - first == len(group.layers) else tuple(range(end - first))
            tier.bring(list(objects.values()), layers, engine)
            coming.update(key for key in objects if tier.coming(key) is not None)
        yield
    return coming


def _lacking(
    pool: Pool, tier: Sources, covering: Covering, keys: Sequence[bytes], found: frozenset[bytes]
) -> Iterator[tuple[Box, bytes]]:
    """What is to be brought so that these are covered in the arena, where the tier does not have them themselves."""

    def there(key: bytes) -> bool:
        return key in found or pool.lookup([key])[0] or tier.holds([key])[0]

    for key, here in zip(keys, pool.lookup(keys), strict=True):
        if not here and key not in found and not tier.holds([key])[0]:
            for box, source in covering.sources(key, there):
                if not pool.lookup([source])[0]:
                    yield box, source


def _piece(spec: ModelSpec, number: int, box: Box, source: bytes, tokens: int, parent: bytes) -> NewObject:
    """An object of another partition: as many blocks, of its own layers and heads."""
    group = spec.groups[number]
    blocks = len(group.rules.keep(tokens))
    one_layer = layer_bytes(group, blocks) // spec.box(number).heads * box.heads
    before = parent + source[DIGEST_BYTES:] if parent else b""
    return NewObject(source, HEADER_BYTES + box.layers * one_layer, blocks, tokens, before)

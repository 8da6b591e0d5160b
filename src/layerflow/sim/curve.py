"""How many tokens a pool of each size would have hit: a trace through the real directory and eviction, without time.

Each request is looked up, and then stored as a whole. So what two requests at once would both compute counts as hit,
and what waits for a link counts as stored; :func:`layerflow.sim.simulation.simulate` knows better, and takes longer.

Long traces are sampled by content, as SHARDS does (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
2015): one in so many chunks is kept, by a hash of it, and a pool of that share of the size holds them. Some such
samples, without a chunk in common, tell the curve together, and by how they differ its error.

A few chunks are in every prompt, and a sample has too many or too few of them. How often chunks come again is known of
the whole trace. What a sample has too little of it is added to its hits: SHARDS-adj's correction, but without chunks
that come once, which never hit. Where everything fits, nothing is left of the error.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from layerflow.config.fields import format_size
from layerflow.errors import ConfigError
from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.directory import DirectoryEntry
from layerflow.pool.eviction import AdaptiveClock, EvictionPolicy
from layerflow.pool.memory import MemoryPool
from layerflow.sim.arena import SimulatedArena, SimulatedHeaders
from layerflow.sim.kinds import refuse_kinds
from layerflow.sim.trace import RequestTrace
from layerflow.spec import ModelSpec

NEAR_BEST = 0.98
"""The knee: the smallest pool that hits this share of what the largest one hits."""

LEAST_SAMPLED = 1000
"""A sample of fewer chunks says nothing."""

SAMPLES = 8
"""At most so many tell a sampled curve, and its error."""

LEAST_HELD = 64
"""A pool that holds fewer chunks of a sample is none: its eviction decides by too few."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size.

    :param hit_tokens: of `tokens`.
    :param error: standard error of the hit rate by sampling; 0 = all of the trace was taken.
    """

    arena_bytes: int
    hit_tokens: int
    tokens: int
    error: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def hit_curve(
    trace: RequestTrace,
    spec: ModelSpec,
    sizes: Sequence[int],
    *,
    eviction: Callable[[], EvictionPolicy[DirectoryEntry]] = AdaptiveClock,
    sample: int = 1,
    skip: float = 0.0,
) -> Iterator[CurvePoint]:
    """One point for each size of the arena, in their order.

    :param sample: one in so many chunks is looked at.
    :param skip: so large a share of the requests fills the pool and is not counted.
    :raises ConfigError: a sample would be too thin to say anything, or the model's caches are not replayed.
    """
    refuse_kinds(spec)
    least = least_arena(spec, sample)
    if small := [size for size in sizes if size < least]:
        raise ConfigError(
            f"an arena of {format_size(min(small))} holds fewer than {LEAST_HELD} chunks of a sample of one in "
            f"{sample}: sample less thinly"
        )
    first = int(len(trace.requests) * skip)
    tokens = sum(request.tokens for request in trace.requests[first:])
    samples = _samples(trace, first, sample)
    thinnest = min(taken.chunks for taken in samples)
    if sample > 1 and thinnest < LEAST_SAMPLED:
        raise ConfigError(
            f"one in {sample} chunks of {trace.name} are {thinnest:,}: at least {LEAST_SAMPLED:,} say something; "
            "sample less thinly"
        )
    for size in sizes:
        hits = [_replay(taken, spec, size // sample, eviction(), first) * sample for taken in samples]
        error = statistics.stdev(hits) / math.sqrt(len(hits)) / tokens if len(hits) > 1 and tokens else 0.0
        yield CurvePoint(size, round(min(tokens, max(0.0, statistics.fmean(hits)))), tokens, error)


def most_hit(trace: RequestTrace) -> CurvePoint:
    """What a pool that holds everything hits; 0 stands for its size."""
    seen: set[bytes] = set()
    purged, hits = _purged(trace), 0
    for number, request in enumerate(trace.requests):
        if number in purged:
            seen.clear()
        found = next((at for at, chunk in enumerate(request.chunks) if chunk not in seen), len(request.chunks))
        hits += min(found * trace.block_tokens, request.tokens - 1)
        seen.update(request.chunks)
    return CurvePoint(0, hits, trace.tokens)


def knee(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The smallest size that hits nearly as much as the best, see :data:`NEAR_BEST`; None where none hits."""
    best = max(point.hit_rate for point in points)
    if not best:
        return None
    return min((point for point in points if point.hit_rate >= NEAR_BEST * best), key=lambda point: point.arena_bytes)


def least_arena(spec: ModelSpec, sample: int) -> int:
    """The smallest arena, in bytes, that samples of one in so many chunks tell of; 0 = the trace is not sampled."""
    if sample == 1:
        return 0
    return LEAST_HELD * sample * sum(nbytes for nbytes, _ in _objects(spec))


def _objects(spec: ModelSpec) -> list[tuple[int, int]]:
    """Bytes and blocks of each object of a chunk: by group, of each shard."""
    counts = [len(group.rules.keep(spec.chunk_tokens)) for group in spec.groups]
    return [
        (object_bytes(group, blocks), blocks)
        for group, blocks in zip(spec.groups, counts, strict=True)
        for _ in spec.shard.peers()
    ]


@dataclass(frozen=True, slots=True)
class _Sample:
    """The chunks of each request that are looked at.

    :param requests: tokens, and chunks. :param purged: the pool is emptied before the requests at these places.
    :param chunks: different ones that are looked at.
    :param lacking: how often the counted requests have too few of them that come again, to be their share of all.
    """

    requests: Sequence[tuple[int, Sequence[bytes]]]
    purged: frozenset[int]
    chunks: int
    lacking: float


def _samples(trace: RequestTrace, first: int, sample: int) -> list[_Sample]:
    """One sample of everything, or :data:`SAMPLES` of other chunks each."""
    purged = _purged(trace)
    if sample == 1:
        everything = [(request.tokens, request.chunks) for request in trace.requests]
        return [_Sample(everything, purged, len({chunk for _, chunks in everything for chunk in chunks}), 0.0)]
    count = min(SAMPLES, sample)
    kept: list[list[list[bytes]]] = [[] for _ in range(count)]
    for request in trace.requests:
        for of in kept:
            of.append([])
        for chunk in request.chunks:
            if (number := _member(chunk, sample)) < count:
                kept[number][-1].append(chunk)
    again = _again([request.chunks for request in trace.requests], first) / sample
    return [
        _Sample(
            [(request.tokens, chunks) for request, chunks in zip(trace.requests, of, strict=True)],
            purged,
            len({chunk for chunks in of for chunk in chunks}),
            again - _again(of, first),
        )
        for of in kept
    ]


def _purged(trace: RequestTrace) -> frozenset[int]:
    """The numbers of the requests before which the pool was emptied."""
    return frozenset(bisect.bisect_left(trace.requests, at, key=lambda request: request.at) for at in trace.purges)


def _member(chunk: bytes, sample: int) -> int:
    """Which of so many samples a chunk is in. A checksum would not do: of numbered chunks it has a pattern."""
    return int.from_bytes(hashlib.blake2b(chunk, digest_size=8).digest(), "little") % sample


def _again(requests: Sequence[Sequence[bytes]], first: int) -> int:
    """How often requests from number `first` on have chunks that came before."""
    seen: set[bytes] = set()
    found = 0
    for number, chunks in enumerate(requests):
        if number >= first:
            found += len(chunks) - len(set(chunks) - seen)
        seen.update(chunks)
    return found


def _replay(
    sample: _Sample, spec: ModelSpec, arena_bytes: int, policy: EvictionPolicy[DirectoryEntry], first: int
) -> float:
    """Tokens hit from request number `first` of the trace on, as far as chunks are sampled."""
    pool = MemoryPool(SimulatedArena(arena_bytes), headers=SimulatedHeaders(), policy=policy)
    chunk, groups, shards = spec.chunk_tokens, range(len(spec.groups)), spec.shard.peers()
    shapes = _objects(spec)
    each = len(shapes)
    hit_tokens = sample.lacking * chunk
    for number, (tokens, chunks) in enumerate(sample.requests):
        if number in sample.purged:
            pool.clear()
        if not chunks:
            continue
        keys = object_keys(chunks, groups, shards)
        there = pool.lookup(keys)
        found = next((at for at, here in enumerate(there) if not here), len(there)) // each
        if found:
            pool.lease(keys[: found * each], "hit", math.inf)
            pool.release("hit")
        if number >= first:
            hit_tokens += min(found * chunk, tokens - 1)
        objects = [NewObject(key, *shapes[at % each], chunk) for at, key in enumerate(keys)][found * each :]
        reserved = pool.reserve(objects, "save")
        pool.commit(
            [new.key for new, room in zip(objects, reserved, strict=True) if room.outcome is ReserveStatus.RESERVED],
            "save",
        )
    return hit_tokens

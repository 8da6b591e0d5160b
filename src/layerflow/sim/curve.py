"""How many tokens a pool of each size would have hit: a trace through the real directory and eviction, without time.

Each request is looked up, and then stored as a whole. So what two requests at once would both compute counts as hit,
and what waits for a link counts as stored; :func:`layerflow.sim.simulation.simulate` knows better, and takes longer.

Long traces are sampled by content, as SHARDS does (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
2015): chunks whose digest falls below a share of all digests are kept, and a pool of that share of the size holds them.
A few chunks are in every prompt, and a sample has too many or too few of them. They always hit: what a sample's
references differ by from their share of all is added to its hits (the paper's SHARDS-adj).
"""

from __future__ import annotations

import bisect
import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from layerflow.errors import ConfigError
from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.directory import DirectoryEntry
from layerflow.pool.eviction import AdaptiveClock, EvictionPolicy
from layerflow.pool.memory import MemoryPool
from layerflow.sim.arena import SimulatedArena, SimulatedHeaders
from layerflow.sim.kinds import refuse_kinds
from layerflow.sim.trace import RequestTrace, TracedRequest
from layerflow.spec import ModelSpec

NEAR_BEST = 0.98
"""The knee: the smallest pool that hits this share of what the largest one hits."""

LEAST_SAMPLED = 1000
"""A sample of fewer chunks says nothing."""

SALTS = 4
"""So many samples, each of other chunks, tell the error of a sampled curve."""

_CRCS = 1 << 32


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size.

    :param hit_tokens: of `tokens`.
    :param error: standard error of the hit rate, where the trace was sampled; 0 = all of it was taken.
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
    first = int(len(trace.requests) * skip)
    tokens = sum(request.tokens for request in trace.requests[first:])
    samples = [_Sample(trace, first, sample, salt) for salt in range(SALTS if sample > 1 else 1)]
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


def knee(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The smallest size that hits nearly as much as the best, see :data:`NEAR_BEST`; None where none hits."""
    best = max(point.hit_rate for point in points)
    if not best:
        return None
    return min((point for point in points if point.hit_rate >= NEAR_BEST * best), key=lambda point: point.arena_bytes)


class _Sample:
    """The chunks of each request that are looked at.

    :ivar purged: the pool is emptied before the requests at these places.
    :ivar chunks: different ones that are looked at.
    :ivar lacking: how many references the counted requests have too few of them, to be their share of all.
    """

    def __init__(self, trace: RequestTrace, first: int, sample: int, salt: int) -> None:
        self.requests = [(request.tokens, _sampled(request, sample, salt)) for request in trace.requests]
        self.purged = {bisect.bisect_left(trace.requests, at, key=lambda request: request.at) for at in trace.purges}
        self.chunks = len({chunk for _, chunks in self.requests for chunk in chunks})
        self.lacking = sum(
            len(request.chunks) / sample - len(chunks)
            for request, (_, chunks) in zip(trace.requests[first:], self.requests[first:], strict=True)
        )


def _sampled(request: TracedRequest, sample: int, salt: int) -> Sequence[bytes]:
    if sample == 1:
        return request.chunks
    return [chunk for chunk in request.chunks if zlib.crc32(chunk, salt) * sample < _CRCS]


def _replay(
    sample: _Sample, spec: ModelSpec, arena_bytes: int, policy: EvictionPolicy[DirectoryEntry], first: int
) -> float:
    """Tokens hit from request number `first` of the trace on, as far as chunks are sampled."""
    pool = MemoryPool(SimulatedArena(arena_bytes), headers=SimulatedHeaders(), policy=policy)
    chunk, groups, shards = spec.chunk_tokens, range(len(spec.groups)), spec.shard.peers()
    each = len(groups) * len(shards)
    counts = [len(group.rules.keep(chunk)) for group in spec.groups]
    shapes = [
        (object_bytes(group, blocks), blocks) for group, blocks in zip(spec.groups, counts, strict=True) for _ in shards
    ]
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

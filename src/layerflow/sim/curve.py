"""How many tokens a pool of each size would have hit: a trace through the real directory and its eviction, without time.

Each request is looked up, and then stored as a whole. So what two requests at once would both compute counts as hit,
and what waits for a link counts as stored; :class:`layerflow.sim.simulation.Simulation` knows better, and takes longer.

Long traces are sampled by content, as SHARDS does (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
2015): chunks whose digest falls below a share of all digests are kept, and a pool of that share of the size holds them.
A few chunks are in every prompt, and a sample has too many or too few of them. They always hit: what a sample's
references differ by from their share of all is added to its hits (the paper's SHARDS-adj).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.directory import DirectoryEntry
from layerflow.pool.eviction import EvictionPolicy, S3Fifo
from layerflow.pool.memory import MemoryPool
from layerflow.sim.arena import SimulatedArena, SimulatedHeaders
from layerflow.sim.trace import RequestTrace, TracedRequest
from layerflow.spec import ModelSpec

NEAR_BEST = 0.98
"""The knee: the smallest pool that hits this share of what the largest one hits."""

SALTS = 4
"""So many samples, each of other chunks, tell the error of a sampled curve."""

_SPREAD = 0x9E3779B97F4A7C15


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
    eviction: Callable[[], EvictionPolicy[DirectoryEntry]] = S3Fifo,
    sample: int = 1,
    skip: float = 0.0,
) -> Iterator[CurvePoint]:
    """One point for each size of the arena, in their order.

    :param sample: one in so many chunks is looked at.
    :param skip: so large a share of the requests fills the pool and is not counted.
    """
    counted = trace.requests[int(len(trace.requests) * skip) :]
    first, tokens = len(trace.requests) - len(counted), sum(request.tokens for request in counted)
    for size in sizes:
        rates = [
            _replay(trace, spec, size // sample, eviction(), first, sample=sample, salt=salt) * sample
            for salt in range(SALTS if sample > 1 else 1)
        ]
        error = statistics.stdev(rates) / math.sqrt(len(rates)) / tokens if len(rates) > 1 else 0.0
        yield CurvePoint(size, round(min(tokens, statistics.fmean(rates))), tokens, error)


def knee(points: Sequence[CurvePoint]) -> CurvePoint:
    """The smallest size that hits nearly as much as the best; see :data:`NEAR_BEST`."""
    best = max(point.hit_rate for point in points)
    return min((point for point in points if point.hit_rate >= NEAR_BEST * best), key=lambda point: point.arena_bytes)


def _replay(
    trace: RequestTrace,
    spec: ModelSpec,
    arena_bytes: int,
    policy: EvictionPolicy[DirectoryEntry],
    first: int,
    *,
    sample: int,
    salt: int,
) -> int:
    """Tokens hit from request number `first` of the trace on, as far as chunks are sampled."""
    pool = MemoryPool(SimulatedArena(arena_bytes), headers=SimulatedHeaders(), policy=policy)
    chunk, shards = spec.chunk_tokens, spec.shard.peers()
    groups = range(len(spec.groups))
    each = len(groups) * len(shards)
    sizes = [(object_bytes(group, blocks), blocks) for group in spec.groups for blocks in [len(group.rules.keep(chunk))]]
    shapes = [shape for shape in sizes for _ in shards]
    hit_tokens = 0
    lacking = 0.0  # references, to their share of all
    for number, request in enumerate(trace.requests):
        chunks = _sampled(request, sample, salt)
        if number >= first:
            lacking += len(request.chunks) / sample - len(chunks)
        if not chunks:
            continue
        keys = object_keys(chunks, groups, shards)
        there = pool.lookup(keys)
        found = next((at for at, here in enumerate(there) if not here), len(there)) // each
        if found:
            pool.lease(keys[: found * each], "hit", math.inf)
            pool.release("hit")
        if number >= first:
            hit_tokens += min(found * chunk, request.tokens - 1)
        objects = [NewObject(key, *shapes[at % each], chunk) for at, key in enumerate(keys)][found * each :]
        reserved = pool.reserve(objects, "save")
        pool.commit(
            [new.key for new, room in zip(objects, reserved, strict=True) if room.outcome is ReserveStatus.RESERVED],
            "save",
        )
    return hit_tokens + round(lacking * chunk)


def _sampled(request: TracedRequest, sample: int, salt: int) -> Sequence[bytes]:
    if sample == 1:
        return request.chunks
    below = (1 << 64) // sample
    return [
        chunk
        for chunk in request.chunks
        if (int.from_bytes(chunk[8:], "little") + 1) * (_SPREAD + 2 * salt) % (1 << 64) < below
    ]

"""The curve of hit tokens: the real pool beside a least-recently-used cache of blocks in a few lines."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from sim.worlds import CHUNK, OBJECT_BYTES, conversations, machine, trace_of

from layerflow.errors import ConfigError
from layerflow.sim.curve import CurvePoint, hit_curve, knee, most_hit
from layerflow.sim.lru import Lru
from layerflow.sim.simulation import one_group_spec
from layerflow.sim.trace import RequestTrace, read_trace

PUBLIC = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl.gz"
SPEC = machine().spec


def least_recently_used(trace: RequestTrace, blocks: int, skip: float = 0.0) -> float:
    """The hit rate of a cache of so many blocks: leading blocks that are there, then all are used."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = tokens = 0
    for number, request in enumerate(trace.requests):
        found = 0
        for chunk in request.chunks:
            if chunk not in cache:
                break
            found += 1
        if number >= int(len(trace.requests) * skip):
            hits += min(found * trace.block_tokens, request.tokens - 1)
            tokens += request.tokens
        for chunk in reversed(request.chunks):
            cache.pop(chunk, None)
            cache[chunk] = None
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits / tokens


def arena_of(blocks: int, block_bytes: int = OBJECT_BYTES) -> int:
    """An arena that holds so many objects, and what its allocator rounds up."""
    return blocks * (block_bytes + 64) + (1 << 20)


@pytest.mark.parametrize("blocks", [20, 60, 200, 1000])
def test_least_recently_used_as_anybody_would_write_it(blocks: int):
    trace = conversations(3, count=600)
    [point] = hit_curve(trace, SPEC, [arena_of(blocks)], eviction=Lru)
    assert point.hit_rate == pytest.approx(least_recently_used(trace, blocks + (1 << 20) // OBJECT_BYTES), abs=0.05)
    assert point.error == 0.0


def test_a_larger_pool_hits_more_until_it_holds_everything():
    trace = conversations(5, count=400)
    points = list(hit_curve(trace, SPEC, [arena_of(blocks) for blocks in (10, 100, 1000, 10_000)], eviction=Lru))
    rates = [point.hit_rate for point in points]
    assert rates == sorted(rates)
    most = least_recently_used(trace, 10**9)
    assert rates[-1] == pytest.approx(most) == most_hit(trace).hit_rate
    purged = replace(trace, purges=(trace.requests[200].at,))
    [point] = hit_curve(purged, SPEC, [arena_of(10_000)])
    assert point.hit_tokens == most_hit(purged).hit_tokens < most_hit(trace).hit_tokens
    assert points[0].tokens == trace.tokens


def test_a_scan_does_not_push_out_what_is_used():
    used = [(float(turn), 4 * CHUNK, 1, [0, 1, 2, 3]) for turn in range(0, 200, 5)]
    scan = [(turn + 0.5, 4 * CHUNK, 1, range(1000 + 4 * turn, 1004 + 4 * turn)) for turn in range(200)]
    trace = trace_of(sorted([*used, *scan], key=lambda prompt: prompt[0]))
    size = [arena_of(8)]
    [plain], [ours] = hit_curve(trace, SPEC, size, eviction=Lru), hit_curve(trace, SPEC, size)
    assert ours.hit_rate > plain.hit_rate + 0.05


def test_a_sample_says_how_far_off_it_may_be():
    trace = conversations(7, count=2500)
    sizes = [arena_of(blocks) for blocks in (800, 4000)]
    whole, sampled = list(hit_curve(trace, SPEC, sizes)), list(hit_curve(trace, SPEC, sizes, sample=8))
    for true, told in zip(whole, sampled, strict=True):
        assert 0.0 < told.error < 0.02
        assert told.hit_rate == pytest.approx(true.hit_rate, abs=4 * told.error)


def test_where_everything_fits_a_sample_is_exact():
    trace = conversations(7, count=3000)
    [whole], [sampled] = (hit_curve(trace, SPEC, [1 << 40], sample=sample, skip=0.3) for sample in (1, 8))
    assert sampled.hit_rate == pytest.approx(whole.hit_rate, abs=0.001) and sampled.error < 0.001


def test_the_error_of_samples_is_what_they_are_off_by():
    """Over many traces the distances from the truth, each in its own standard errors, are about 1."""
    off = []
    for seed in range(4):
        trace = conversations(seed, count=2500)
        [whole], [sampled] = (hit_curve(trace, SPEC, [arena_of(800)], sample=sample) for sample in (1, 8))
        off.append((sampled.hit_rate - whole.hit_rate) / sampled.error)
    assert 0.3 < statistics.stdev(off) < 2.0 and abs(statistics.fmean(off)) < 1.0, off


def test_the_knee_is_the_smallest_that_is_nearly_the_best():
    points = [CurvePoint(size, hits, 1000) for size, hits in ((1, 100), (2, 395), (4, 400), (8, 401))]
    assert knee(points) == points[1]
    assert knee([CurvePoint(1, 0, 10), CurvePoint(2, 0, 10)]) is None


def test_a_sample_that_is_too_thin_and_caches_that_are_not_replayed_are_refused():
    trace = conversations(7, count=100)
    with pytest.raises(ConfigError, match="sample less thinly"):
        list(hit_curve(trace, SPEC, [1 << 40], sample=1000))
    with pytest.raises(ConfigError, match="1MiB holds fewer than 64 chunks"):
        list(hit_curve(conversations(7, count=3000), SPEC, [1 << 40, 1 << 20], sample=8))
    window = msgspec.structs.replace(SPEC.groups[0], kind="sliding", window=128)
    with pytest.raises(ConfigError, match="not simulated yet"):
        list(hit_curve(trace, msgspec.structs.replace(SPEC, groups=(window,)), [1 << 20]))


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public trace is not here")
@pytest.mark.campaign
def test_a_public_hour_of_conversations():
    """Least recently used is within a point of anybody's, and of kvcache-simulator's where it is installed."""
    trace = read_trace(PUBLIC)
    spec = one_group_spec(layers=32, bytes_per_token=4096, chunk_tokens=512, block_size=16, tp=1)
    for blocks in (1000, 10_000, 30_000):
        size = blocks * (512 * 4096 * 32 + 64) + (8 << 20)
        [point] = hit_curve(trace, spec, [size], eviction=Lru, skip=0.5)
        [ours] = hit_curve(trace, spec, [size], skip=0.5)
        print(f"{blocks} blocks: LRU {point.hit_rate:.2%}, ours {ours.hit_rate:.2%}")
        assert point.hit_rate == pytest.approx(least_recently_used(trace, blocks, skip=0.5), abs=0.01)
        if find_spec("kvcache_sim") is not None:
            assert point.hit_rate == pytest.approx(_theirs(blocks), abs=0.01)


def _theirs(blocks: int) -> float:
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    plan = build_execution_plan(parse_trace_file(str(PUBLIC), block_size=512), warmup_fraction=0.5)
    return float(simulate_policy(plan, "lru", blocks).hitRate)

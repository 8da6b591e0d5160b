"""Hit lengths against a model that tries every length, and leases."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.agent.presence import MOST_LOOKS, PresenceView, hit_of
from layerflow.agent.values import Hit
from layerflow.hits import MAX_TAILS, SLICE_KEYS, HitLength, Tail, find_hit, search_hit
from layerflow.keys import Chain, object_key, object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.presence import PresenceWriter
from layerflow.server.search import hit_keys
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from server.support import Memory

ROOT = b"r" * 16
BLOCK, CHUNK = 2, 4
STATE = -1


def spec_of(windows: list[int], shards: int | Shard = 1) -> ModelSpec:
    """One group per window, 0 = full attention, STATE = recurrent state."""
    plane = (Plane("kv", "uint8", (1,)),)
    groups = tuple(
        GroupSpec(_KINDS.get(window, "sliding"), BLOCK, (layer,), plane, window=max(0, window))
        for layer, window in enumerate(windows)
    )
    return ModelSpec("m", "c", groups, shards if isinstance(shards, Shard) else Shard(0, shards), chunk_tokens=CHUNK)


_KINDS = {0: "full", STATE: "state"}


def store(pool: MemoryPool, spec: ModelSpec, group: int, shard: Shard, chain: Chain, chunk: int, tokens: int) -> None:
    """Publish one object: the first `tokens` tokens of a chunk."""
    blocks = len(spec.groups[group].rules.keep(tokens))
    key = object_key(chain.partial(chunk, tokens), group, shard)
    parent = object_key(chain.parent(chunk), group, shard) if tokens < CHUNK else b""
    pool.reserve([NewObject(key, object_bytes(spec.groups[group], blocks), blocks, tokens, parent)], "writer")
    pool.commit([key], "writer")


@dataclass
class World:
    spec: ModelSpec
    pool: MemoryPool
    presence: PresenceWriter
    chain: Chain
    present: set[tuple[int, int, int, int]]  #: group, tp rank, chunk, tokens

    def complete(self, group: int, chunk: int, tokens: int) -> bool:
        return all((group, rank, chunk, tokens) in self.present for rank in range(self.spec.shard.tp_size))

    def loadable(self, hit: int, chunk: int, tail: int) -> bool:
        """Token by token: has every group what a hit of `hit` tokens reads, if chunk `chunk` holds `tail` of them?"""
        for number, group in enumerate(self.spec.groups):
            if group.kind == "state" and hit:
                last = (hit - 1) // CHUNK
                held = tail if last == chunk else CHUNK
                if last * CHUNK + held != hit or not self.complete(number, last, held):
                    return False
                continue
            first = max(0, hit - group.window + 1) if group.window else 0
            for token in range(first, hit):
                holder = token // CHUNK
                if not self.complete(number, holder, tail if holder == chunk else CHUNK):
                    return False
        return True


@st.composite
def worlds(draw: st.DrawFn, nbytes: int = 1 << 16) -> World:
    windows = draw(st.lists(st.sampled_from([0, 2, 3, 4, 6, 9, STATE]), min_size=1, max_size=3))
    spec = spec_of(windows, draw(st.integers(1, 2)))
    length = draw(st.integers(1, 5 * CHUNK))
    chain = Chain(ROOT, np.arange(length), CHUNK)
    presence = PresenceWriter(nbytes)
    pool = MemoryPool(Memory(nbytes), presence)
    sizes = [(chunk, CHUNK) for chunk in range(length // CHUNK)]
    sizes += [
        (chunk, tail)
        for chunk in range(-(-length // CHUNK))
        for tail in range(1, min(CHUNK, length - chunk * CHUNK + 1))
    ]
    everything = [
        (group, rank, chunk, tokens)
        for group in range(len(windows))
        for rank in range(spec.shard.tp_size)
        for chunk, tokens in sizes
    ]
    # Mostly present: with coin flips nothing would ever be found.
    absent = draw(st.sets(st.sampled_from(everything), max_size=max(1, len(everything) // 3)))
    present = set(everything) - absent
    for group, rank, chunk, tokens in sorted(present):
        store(pool, spec, group, Shard(rank, spec.shard.tp_size), chain, chunk, tokens)
    return World(spec, pool, presence, chain, present)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_the_longest_hit_and_no_longer(world: World) -> None:
    tokens = len(world.chain)
    hit = find_hit(world.pool, world.spec, ROOT, world.chain.digests, tokens)
    whole = [min(chunk * CHUNK, tokens - 1) for chunk in range(tokens // CHUNK + 1)]
    best_whole = max(n for chunk, n in enumerate(whole) if world.loadable(n, chunk, CHUNK))
    assert hit.tokens == best_whole
    offered = {(tail.chunk, tail.tokens) for tail in hit.tails}
    for tail in hit.tails:
        assert tail.digest == world.chain.partial(tail.chunk, tail.tokens)
        assert world.loadable(min(tail.chunk * CHUNK + tail.tokens, tokens - 1), tail.chunk, tail.tokens)
    best_tail = max(
        (
            (chunk * CHUNK + tail, chunk, tail)
            for chunk in range(-(-tokens // CHUNK))
            for tail in range(1, min(CHUNK, tokens - chunk * CHUNK + 1))
            if chunk * CHUNK + tail > best_whole
            if min(chunk * CHUNK + tail, tokens - 1) > chunk * CHUNK  # what adds no token is not offered
            if chunk * CHUNK + tail < tokens or not world.spec.exact
            if all(world.complete(group, chunk, tail) for group in range(len(world.spec.groups)))
            if world.loadable(min(chunk * CHUNK + tail, tokens - 1), chunk, tail)
        ),
        default=None,
    )
    if best_tail is not None:
        assert best_tail[1:] in offered
        longest = hit.tails[0]
        assert longest.chunk * CHUNK + longest.tokens == best_tail[0], "tails are offered longest first"


@settings(max_examples=100, deadline=None)
@given(worlds(), st.data())
def test_a_client_that_does_not_ask_would_have_found_nothing(world: World, data: st.DataObject) -> None:
    """And of a prompt that shares nothing with a stored one it knows that, if a group reads every token."""
    hidden = data.draw(st.sets(st.sampled_from(sorted(world.present) or [(0, 0, 0, 1)])))
    world.pool.hide(
        [
            object_key(world.chain.partial(chunk, tokens), group, Shard(rank, world.spec.shard.tp_size))
            for group, rank, chunk, tokens in hidden
        ]
    )
    sight = PresenceView(world.presence.memory, world.spec)
    nothing = HitLength(0, ())
    if sight.misses(world.chain):
        assert find_hit(world.pool, world.spec, ROOT, world.chain.digests, len(world.chain)) == nothing
    other = Chain(b"o" * 16, world.chain.tokens, CHUNK)
    assert sight.misses(other) == any(group.kind == "full" for group in world.spec.groups)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_what_a_client_sees_for_itself_is_what_the_server_would_say(world: World) -> None:
    chain = world.chain
    rest = len(chain) % CHUNK
    own = chain.partial(len(chain.digests), rest) if rest else b""
    said = find_hit(world.pool, world.spec, ROOT, chain.digests, len(chain), tail_digest=own)
    assert PresenceView(world.presence.memory, world.spec).hit(chain) == hit_of(said, chain, world.spec)


def test_a_client_does_not_look_for_a_long_prompt_itself() -> None:
    presence, spec = PresenceWriter(1 << 16), spec_of([0])
    longest = Chain(ROOT, np.arange(MOST_LOOKS * CHUNK), CHUNK)
    sight = PresenceView(presence.memory, spec)
    assert sight.hit(longest) == Hit(0)
    longest.extend(np.arange(CHUNK))
    assert sight.hit(longest) is None


def test_a_client_that_cannot_tell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket of the prompt's second chunk has overflowed."""
    presence, spec = PresenceWriter(1 << 16), spec_of([0])
    chain = Chain(ROOT, np.arange(3 * CHUNK), CHUNK)
    keys = [object_key(digest, 0, spec.shard) for digest in chain.digests]
    presence.add(keys[0])
    sight = PresenceView(presence.memory, spec)
    assert sight.hit(chain) == Hit(CHUNK)
    holds = sight._table.holds
    monkeypatch.setattr(sight._table, "holds", lambda key: None if key == keys[1] else holds(key))
    assert sight.hit(chain) is None


@settings(max_examples=60, deadline=None)
@given(worlds(1 << 15))
def test_a_lease_holds_all_that_a_load_reads(world: World) -> None:
    tokens = len(world.chain)
    hit = find_hit(world.pool, world.spec, ROOT, world.chain.digests, tokens)
    keys = [key for few in hit_keys(world.spec, world.chain.digests, hit) for key in few]
    there = [key for key, here in zip(keys, world.pool.lookup(keys), strict=True) if here]
    world.pool.acquire(there, "lease", until=5.0)
    # Eviction takes whatever is not pinned: fill the pool, then look whether the hit is still whole.
    filler = Chain(b"f" * 16, np.arange(600 * CHUNK), CHUNK)
    for chunk in range(len(filler.digests)):
        store(world.pool, world.spec, 0, world.spec.shard, filler, chunk, CHUNK)
    assert world.pool.statistics().evictions > 0
    assert find_hit(world.pool, world.spec, ROOT, world.chain.digests, tokens) == hit
    world.pool.expire(5.0)
    assert world.pool.statistics().pinned == 0


def test_what_a_hit_leases_comes_in_slices_its_tails_too() -> None:
    spec = spec_of([0, 0], shards=64)
    digests = [struct.pack("<QQ", 0, number) for number in range(40)]
    tails = tuple(Tail(40, 2, struct.pack("<QQ", 1, number)) for number in range(MAX_TAILS))
    slices = list(hit_keys(spec, digests, HitLength(40 * CHUNK, tails)))
    assert max(map(len, slices)) <= SLICE_KEYS
    wanted = [*digests, *(tail.digest for tail in tails)]
    assert [key for few in slices for key in few] == object_keys(wanted, range(2), spec.shard.peers())


class Everything:
    """Has all objects but `missing`, and as many tails behind each chunk as are offered; counts what it is asked."""

    def __init__(self, missing: bytes = b"") -> None:
        self.missing, self.asked = missing, list[list[bytes]]()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(list(keys))
        return [key != self.missing for key in keys]

    def tails(self, parent: bytes, most: int, *, undigested: bool) -> list[tuple[int, bytes]]:
        return [(BLOCK, struct.pack("<QQQ", 2, number, 0)) for number in range(MAX_TAILS)]

    def sharing(self, prompt_blocks: bytes) -> list[tuple[int, int, bytes, int]]:
        return []


def test_a_draft_models_objects_are_looked_up_once_each_and_in_slices() -> None:
    spec = spec_of([STATE, 0], shards=Shard(0, 8, drafts=("", "d")))
    digests = [struct.pack("<QQ", 0, number) for number in range(1000)]
    source, steps = Everything(), list[int]()

    def drafts_of(source: Everything) -> bool:
        search = search_hit(source, spec, ROOT, digests, 1000 * CHUNK + BLOCK + 1)
        try:
            while True:
                before = len(source.asked)
                next(search)
                steps.append(sum(map(len, source.asked[before:])))
        except StopIteration as stop:
            steps.append(sum(map(len, source.asked[before:])))
            hit: HitLength = stop.value
            assert (hit.tokens, len(hit.tails)) == (1000 * CHUNK, MAX_TAILS)
            return hit.drafts

    assert drafts_of(source)
    wanted = object_keys(
        [*digests, *(struct.pack("<QQ", 2, tail) for tail in range(MAX_TAILS))], [1], spec.shard.peers()
    )
    drafts = set(wanted)
    assert sorted(key for keys in source.asked for key in keys if key in drafts) == sorted(wanted), "33 ends need them"
    assert max(steps) <= SLICE_KEYS + MAX_TAILS * 8
    lacking = Everything(wanted[0])
    assert not drafts_of(lacking)
    assert sum(key in drafts for keys in lacking.asked for key in keys) <= SLICE_KEYS, "nothing behind the first"


def test_tails_of_other_prompts_are_offered_but_bounded() -> None:
    spec = spec_of([0])
    pool = MemoryPool(Memory(1 << 16))
    shared = np.arange(CHUNK)
    for last in range(3 * MAX_TAILS):
        other = Chain(ROOT, np.append(shared, [100 + last] * 2), CHUNK)
        store(pool, spec, 0, spec.shard, other, 0, CHUNK)
        store(pool, spec, 0, spec.shard, other, 1, 2)
    mine = Chain(ROOT, np.append(shared, [7] * 3), CHUNK)
    hit = find_hit(pool, spec, ROOT, mine.digests, len(mine))
    assert hit.tokens == CHUNK
    assert len(hit.tails) == MAX_TAILS


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_token_is_always_left(tokens: int) -> None:
    spec = spec_of([0])
    pool = MemoryPool(Memory(1 << 16))
    chain = Chain(ROOT, np.arange(tokens), CHUNK)
    store(pool, spec, 0, spec.shard, chain, 0, tokens)
    hit = find_hit(pool, spec, ROOT, chain.digests, tokens)
    assert hit.tokens == 0
    assert [tail.tokens for tail in hit.tails] == [tokens] * (tokens > 1), "a hit of no token is none"


def test_an_empty_pool() -> None:
    chain = Chain(ROOT, np.arange(30), CHUNK)
    assert find_hit(MemoryPool(Memory(1 << 16)), spec_of([0, 3]), ROOT, chain.digests, 30) == HitLength(0, ())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_state_is_found_at_its_own_boundary_or_not_at_all(shards: int) -> None:
    spec = spec_of([0, STATE], shards)
    pool = MemoryPool(Memory(1 << 16))
    chain = Chain(ROOT, np.arange(4 * CHUNK), CHUNK)
    for rank in range(shards):
        for chunk in range(4):
            store(pool, spec, 0, Shard(rank, shards), chain, chunk, CHUNK)
        for chunk, tokens in ((1, CHUNK), (3, CHUNK), (2, BLOCK)):
            store(pool, spec, 1, Shard(rank, shards), chain, chunk, tokens)
        store(pool, spec, 0, Shard(rank, shards), chain, 2, BLOCK)
    tail = 2 * CHUNK + BLOCK
    for length, tokens, tails in (
        (2 * CHUNK, 0, []),  # the state at the prompt's end leaves nothing to compute; before it there is none
        (2 * CHUNK + 1, 2 * CHUNK, []),
        (tail, 2 * CHUNK, []),
        (tail + 1, 2 * CHUNK, [tail]),
        (4 * CHUNK, 2 * CHUNK, [tail]),
        (4 * CHUNK + 9, 4 * CHUNK, []),
    ):
        prompt = Chain(ROOT, np.arange(length), CHUNK)
        hit = find_hit(pool, spec, ROOT, prompt.digests, length)
        assert (hit.tokens, [each.chunk * CHUNK + each.tokens for each in hit.tails]) == (tokens, tails), length
    if shards == 2:
        pool.hide([object_key(chain.digests[1], 1, Shard(1, 2))])
        assert find_hit(pool, spec, ROOT, chain.digests[:2], 2 * CHUNK + 1).tokens == 0, "one shard has lost its state"

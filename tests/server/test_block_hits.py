"""Hits that end at a block, in the middle of a stored chunk: which are found, and whose bytes they load."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.known import KnownWorker, eventually, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.agent.descriptors import describe_loads
from layerflow.agent.presence import PresenceView, hit_of, lookup_of
from layerflow.agent.values import StepRequest
from layerflow.errors import SpecError
from layerflow.hits import MAX_TAILS, BlockDigests, find_hit
from layerflow.keys import DIGEST_BYTES, Chain, Media, leading_blocks, object_key
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.presence import PresenceWriter
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from server.support import Embed, Memory, observe, worker_on

ROOT = b"r" * 16
BLOCK, CHUNK = 2, 8
PATIENT = {"transfer__step_timeout_ms": 60_000, "transfer__save_timeout_ms": 60_000, "pool__lease_ms": 60_000}
"""Deadlines that a busy machine keeps: what is moved is tested here, not how soon."""


def spec_of(windows: list[int], shards: int = 1) -> ModelSpec:
    plane = (Plane("kv", "uint8", (1,)),)
    groups = tuple(
        GroupSpec("sliding" if window else "full", BLOCK, (layer,), plane, window=window)
        for layer, window in enumerate(windows)
    )
    return ModelSpec("m", "c", groups, Shard(0, shards), chunk_tokens=CHUNK)


def store(pool: MemoryPool, spec: ModelSpec, group: int, shard: Shard, chain: Chain, chunk: int, tokens: int) -> None:
    """Publish one object as a save would."""
    blocks = len(spec.groups[group].rules.keep(tokens))
    key = object_key(chain.partial(chunk, tokens), group, shard)
    parent = object_key(chain.parent(chunk), group, shard) if tokens < CHUNK else b""
    indexed = not group and not shard.tp_rank
    digests = chain.block_digests(chunk, spec.block_tokens, tokens) if indexed else b""
    new = NewObject(key, object_bytes(spec.groups[group], blocks), blocks, tokens, parent, digests)
    pool.reserve([new], "writer")
    pool.commit([key], "writer")


def blocks_of(chain: Chain, spec: ModelSpec, end: int | None = None) -> BlockDigests:
    asked = lookup_of(1, "r", chain, lease_ms=1, block_tokens=spec.block_tokens, end=end)
    return BlockDigests(asked.blocks_from, asked.block_digests, spec.chunk_tokens // spec.block_tokens)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_leading_blocks_of_chained_digests(one: list[int], other: list[int]) -> None:
    first, second = Chain(ROOT, one, 12), Chain(ROOT, other, 12)
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    assert leading_blocks(first.block_digests(0, 2), second.block_digests(0, 2)) == same // 2


@given(st.integers(0, 40), st.integers(1, 16), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=2))
def test_a_block_digest_is_the_digest_of_the_chunk_up_to_there(length: int, unit: int, media: list) -> None:
    chain = Chain(ROOT, list(range(length)), 16, [Media(start, count, b"picture") for start, count in sorted(media)])
    for chunk in range(length // 16 + 1):
        held = min(16, length - chunk * 16)
        for most in (0, held // 2):
            ends = range(unit, (most or held) + 1, unit)
            expected = b"".join(chain.partial(chunk, end) for end in ends)
            assert chain.block_digests(chunk, unit, most) == expected


def test_who_shares_most_and_serves_no_hit_hides_nobody() -> None:
    """One token is left to compute, which moves the window's beginning into a block that the longer object lacks."""
    spec, pool = spec_of([0, 3]), MemoryPool(Memory(1 << 17), PresenceWriter(1 << 16))
    for ids in ([0, 0], [0, 0, 0, 0, 0]):
        for group in range(2):
            store(pool, spec, group, Shard(0, 1), Chain(ROOT, ids, CHUNK), 0, len(ids))
    chain = Chain(ROOT, [0, 0, 0, 0], CHUNK)
    found = find_hit(pool, spec, ROOT, chain.digests, len(chain), tail_digest=chain.tail, blocks=blocks_of(chain, spec))
    assert hit_of(found, chain, spec).tokens == 2


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Stored prompts, and one that shares a beginning with some of them."""
    tree = st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK)
    stored = draw(st.lists(tree, min_size=1, max_size=5))
    like = draw(st.sampled_from(stored))
    shared = draw(st.integers(0, len(like)))
    return stored, like[:shared] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=2 * CHUNK))


@settings(max_examples=300, deadline=None)
@given(prompts(), st.sampled_from([[0], [0, 0], [0, 8], [0, 3], [3, 0], [11, 0]]), st.integers(1, 2), st.data())
def test_a_hit_reaches_the_last_shared_block(
    given_prompts: tuple[list[list[int]], list[int]], windows: list[int], shards: int, data: st.DataObject
) -> None:
    """Against every length tried with every stored object."""
    spec, (stored, tokens) = spec_of(windows, shards), given_prompts
    presence = PresenceWriter(1 << 16)
    pool = MemoryPool(Memory(1 << 17), presence)
    objects: set[tuple[tuple[int, ...], int]] = set()  # all tokens up to its end, and how many are its own
    for one in stored:
        sizes = [((chunk + 1) * CHUNK, CHUNK) for chunk in range(len(one) // CHUNK)]
        sizes += [(len(one), len(one) % CHUNK)] if len(one) % CHUNK else []
        objects |= {(tuple(one[:end]), held) for end, held in sizes}
    gone = data.draw(st.sets(st.sampled_from(sorted(objects)), max_size=2))
    for ids, held in sorted(objects):
        chain = Chain(ROOT, list(ids), CHUNK)
        for rank, group in itertools.product(range(shards), range(len(windows))):
            if (ids, held) not in gone or data.draw(st.booleans()):
                store(pool, spec, group, Shard(rank, shards), chain, (len(ids) - held) // CHUNK, held)
    pool.validate()

    def complete(ids: tuple[int, ...], held: int) -> bool:
        chain = Chain(ROOT, list(ids), CHUNK)
        digest = chain.partial((len(ids) - held) // CHUNK, held)
        keys = [object_key(digest, group, shard) for group in range(len(windows)) for shard in spec.shard.peers()]
        return all(pool.lookup(keys))

    def whole(chunk: int, group: int) -> bool:
        ids = tuple(tokens[: (chunk + 1) * CHUNK])
        digest = Chain(ROOT, list(ids), CHUNK).digests[-1]
        return all(pool.lookup([object_key(digest, group, shard) for shard in spec.shard.peers()]))

    def loadable(hit: int, chunk: int, held: int) -> bool:
        """Chunk `chunk` from an object of `held` tokens, those before from the prompt's own chunks."""
        for number, group in enumerate(spec.groups):
            first = group.rules.first_token(hit)
            if any(not whole(other, number) for other in range(first // CHUNK, chunk)):
                return False
            if hit > chunk * CHUNK and max(first - chunk * CHUNK, 0) // BLOCK < group.rules.keep(held).start:
                return False
        return True

    best = 0
    for ids, held in objects:
        chunk = (len(ids) - held) // CHUNK
        start = chunk * CHUNK
        if tuple(tokens[:start]) != ids[:start] or not complete(ids, held):
            continue
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, tokens, strict=False)))) - start
        for shared in {same if same == held else 0, *range(BLOCK, same + 1, BLOCK)} - {0}:
            hit = min(start + shared, len(tokens) - 1)
            if hit > best and loadable(hit, chunk, held):
                best = hit
    chain = Chain(ROOT, tokens, CHUNK)
    own = chain.tail
    found = find_hit(pool, spec, ROOT, chain.digests, len(chain), tail_digest=own, blocks=blocks_of(chain, spec))
    hit = hit_of(found, chain, spec)
    if not gone:
        assert hit.tokens == best
    assert hit.tokens <= best
    sight = PresenceView(presence.memory, spec)
    assert not (sight.misses(chain) and hit.tokens)
    seen = sight.hit(chain)
    assert seen is None or seen.tokens == hit.tokens or gone
    # The chunk that the table shows is the one that counts.
    if not gone and (end := sight.end(chain)) is not None:
        few = find_hit(pool, spec, ROOT, chain.digests, len(chain), tail_digest=own, blocks=blocks_of(chain, spec, end))
        assert hit_of(few, chain, spec).tokens == hit.tokens


def test_of_many_chunks_the_one_that_shares_most_is_offered() -> None:
    spec, pool = spec_of([0]), MemoryPool(Memory(1 << 18))
    begin = [7] * (CHUNK + BLOCK)
    for last in range(100):
        store(pool, spec, 0, spec.shard, Chain(ROOT, [*begin, last, *[9] * (CHUNK - BLOCK - 1)], CHUNK), 1, CHUNK)
    store(pool, spec, 0, spec.shard, Chain(ROOT, begin, CHUNK), 0, CHUNK)
    mine = Chain(ROOT, [*begin, 3, 9, 9, 1], CHUNK)
    found = find_hit(pool, spec, ROOT, mine.digests, len(mine), tail_digest=mine.tail, blocks=blocks_of(mine, spec))
    assert [(tail.chunk, tail.tokens, tail.shared) for tail in found.tails] == [(1, CHUNK, 2 * BLOCK)]


def test_what_is_offered_is_bounded() -> None:
    spec, pool = spec_of([0]), MemoryPool(Memory(1 << 18))
    for last in range(3 * MAX_TAILS):
        store(pool, spec, 0, spec.shard, Chain(ROOT, [7] * BLOCK + [last], CHUNK), 0, BLOCK + 1)
    mine = Chain(ROOT, [7] * BLOCK + [1000, 1], CHUNK)
    found = find_hit(pool, spec, ROOT, mine.digests, len(mine), tail_digest=mine.tail, blocks=blocks_of(mine, spec))
    assert len(found.tails) == MAX_TAILS
    assert hit_of(found, mine, spec).tokens == BLOCK


# Served ------------------------------------------------------------------------------------------


def make(server: EmbeddedServer, window: int = 0, **more: object) -> KnownWorker:
    spec = small_spec(4, 4, 16, row=8, window=window)
    return worker_on(server, spec=spec, blocks=256, lookup_timeout_s=30.0, **more)


@pytest.mark.parametrize("discard", [False, True], ids=["tails", "whole chunks"])
@pytest.mark.parametrize("window", [0, 16, 37])
def test_prompts_that_part_in_the_middle_of_a_chunk(embed: Embed, window: int, discard: bool) -> None:
    with make(embed(**PATIENT, transfer__discard_partial_chunks=discard), window) as worker:
        stored = worker.prompt(64)
        worker.serve(stored)
        for shared in (1, 3, 4, 5, 15, 16, 17, 31, 39, 40, 63):
            other = worker.prompt(shared + 21, like=stored, shared=shared)
            assert worker.serve(other).hit.tokens == shared // 4 * 4, shared
            # What was loaded of another prompt's chunk and saved again as its own is right too.
            assert worker.serve(other).hit.tokens == (len(other) // 16 * 16 if discard else len(other) - 1), shared


@pytest.mark.parametrize("shared", [300, 777, 1500, 3000])
def test_shared_prefixes_with_suffixes_of_their_own(embed: Embed, shared: int) -> None:
    spec = small_spec(2, 16, 256, row=8)
    with worker_on(embed(**PATIENT), spec=spec, blocks=512, lookup_timeout_s=30.0) as worker:
        first = worker.prompt(shared + 64)
        worker.serve(first)
        for _ in range(3):
            other = worker.prompt(shared + 64, like=first, shared=shared)
            assert worker.serve(other).hit.tokens == shared // 16 * 16


def test_a_conversation_of_eight_turns(embed: Embed) -> None:
    """Among others that began with the same words."""
    with make(embed(**PATIENT)) as worker:
        system = worker.prompt(18)
        talks = [worker.prompt(25 + number, like=system, shared=18) for number in range(6)]
        for number, talk in enumerate(talks):
            assert worker.serve(talk).hit.tokens == (16 if number else 0)
        for _ in range(7):
            for number, talk in enumerate(talks):
                longer = worker.prompt(len(talk) + 9, like=talk, shared=len(talk))
                assert worker.serve(longer).hit.tokens == len(talk)
                talks[number] = longer


def test_prompts_shorter_than_a_chunk(embed: Embed) -> None:
    with make(embed(**PATIENT)) as worker:
        for stored, asked, shared, hit in ((15, 15, 9, 8), (30, 10, 10, 8), (30, 8, 8, 7), (7, 12, 7, 7), (3, 9, 3, 3)):
            first = worker.prompt(stored)
            worker.serve(first)
            assert worker.serve(worker.prompt(asked, like=first, shared=shared)).hit.tokens == hit, (stored, asked)


def test_a_window_smaller_than_a_chunk_ends_hits_where_its_objects_do(embed: Embed) -> None:
    with make(embed(**PATIENT), 5) as worker:
        stored = worker.prompt(64)
        worker.serve(stored)
        assert worker.serve(worker.prompt(50, like=stored, shared=40)).hit.tokens == 32
        short = worker.prompt(22)
        worker.serve(short)  # of a tail of 6 tokens all blocks are kept
        assert worker.serve(worker.prompt(50, like=short, shared=21)).hit.tokens == 20


def test_a_chunk_that_was_read_from_is_pinned_and_given_back(embed: Embed) -> None:
    server = embed(**PATIENT)
    with make(server) as worker:
        stored = worker.prompt(32)
        worker.serve(stored)
        run = worker.admit(worker.prompt(40, like=stored, shared=28))
        assert run.hit.tokens == 28
        seen = observe(server)
        try:
            assert seen.status()["pool"]["pinned"] == 2
            # Eviction between lookup and load: the lease keeps what the hit reads.
            for _ in range(60):
                worker.serve(worker.prompt(128), look=False)
            with worker.agent.open_step([run.request()], None) as step:
                assert worker.forward(step, [run]) == 0
            assert not run.failed
            assert worker.agent.wait_idle(run.name, 20)
            assert eventually(lambda: seen.status()["pool"]["pinned"] == 0)
        finally:
            seen.close()


def test_a_chunk_that_left_between_lookup_and_load_fails_its_blocks_alone(embed: Embed) -> None:
    server = embed(**PATIENT)
    with make(server) as worker:
        stored = worker.prompt(32)
        worker.serve(stored)
        run = worker.admit(worker.prompt(40, like=stored, shared=28), planned=False)
        server.call(lambda: server.server.pool.hide([object_key(stored.digests[1], 0, worker.spec.shard)]))
        with worker.agent.open_step([run.request()], None) as step:
            worker.forward(step, [run])
        assert set(run.failed) == {0}
        assert run.failed[0] == {4, 5, 6}
        assert worker.agent.wait_idle(run.name, 20)
        again = worker.prompt(40, like=stored, shared=28)
        assert worker.serve(again).hit.tokens == 16, "what is hidden is offered no more"


def test_a_disk_remembers_blocks_over_a_restart(embed: Embed, tmp_path: Path) -> None:
    """And chunks that left the arena are brought back for a hit that ends in their middle."""
    disk = {**PATIENT, "pool__size": "4MiB", "pool__lookup_timeout_ms": 10_000}
    disk["pool__disk"] = {"path": str(tmp_path / "tier"), "capacity": 256 << 20}
    server = embed(**disk)
    with make(server) as worker:
        assert eventually(lambda: tier_of(server)["up"])
        prompts = [worker.prompt(61) for _ in range(3)]
        for prompt in prompts:
            worker.serve(prompt)
        assert eventually(lambda: tier_of(server)["indexed_objects"] == 3 * 4)
        server.call(server.server.pool.clear)  # as if other prompts had driven them out
        assert worker.serve(worker.prompt(70, like=prompts[0], shared=42)).hit.tokens == 40
        server.call(server.server.pool.clear)
        assert worker.serve(worker.prompt(70, like=prompts[0], shared=58)).hit.tokens == 56
        assert eventually(lambda: not tier_of(server)["writing_jobs"])
    server.close()
    server = embed(**disk)
    with make(server) as worker:
        assert eventually(lambda: tier_of(server)["indexed_objects"] >= 3 * 4)
        other = worker.prompt(70, like=prompts[1], shared=42)

        def hit() -> int:
            name = f"look-{next(numbers)}"
            found = worker.agent.lookup(name, other).tokens
            worker.agent.drop_lease(name)
            return found

        numbers = itertools.count()
        assert eventually(lambda: hit() == 40), "the block digests of its files are read a moment later"
        assert worker.serve(other).hit.tokens == 40
        assert worker.serve(worker.prompt(70, like=prompts[2], shared=61)).hit.tokens == 61


def tier_of(server: EmbeddedServer) -> dict[str, Any]:
    seen = observe(server)
    try:
        return seen.status()["tier"]
    finally:
        seen.close()


@pytest.mark.parametrize("window", [0, 20])
def test_every_rank_must_have_the_chunk(embed: Embed, window: int) -> None:
    server = embed(**PATIENT)
    shards = [Shard(rank, 2) for rank in range(2)]
    specs = [small_spec(4, 4, 16, row=8, window=window, shard=shard) for shard in shards]
    with contextlib.ExitStack() as ranks:
        one, two = (ranks.enter_context(worker_on(server, spec=spec, lookup_timeout_s=30.0)) for spec in specs)
        stored = one.prompt(40)
        others = [one.prompt(50, like=stored, shared=30) for _ in range(3)]
        one.serve(stored)
        assert one.serve(others[0]).hit.tokens == 0
        two.serve(stored)
        for worker, other in zip((two, one, two), others, strict=True):
            run = worker.admit(other)
            with worker.agent.open_step([run.request()], None) as step:
                assert worker.forward(step, [run]) == 0
            assert (run.hit.tokens, run.failed) == (28, {})
            assert worker.agent.wait_idle(run.name, 20)


def test_a_corrupted_chunk_is_computed_and_not_offered_again(embed: Embed, tmp_path: Path) -> None:
    server = embed(**PATIENT, pool__disk={"path": str(tmp_path / "tier")}, pool__lookup_timeout_ms=10_000)
    with make(server) as worker:
        assert eventually(lambda: tier_of(server)["up"])
        stored = worker.prompt(61)
        worker.serve(stored)
        assert eventually(lambda: tier_of(server)["indexed_objects"] == 4)
        server.call(server.server.pool.clear)
        (file,) = (tmp_path / "tier").rglob(f"{stored.digests[1].hex()}*")
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
        other = worker.prompt(70, like=stored, shared=26)
        run = worker.admit(other)
        assert run.hit.tokens == 24
        with worker.agent.open_step([run.request()], None) as step:
            worker.forward(step, [run])
        assert set(run.failed[0]) == {4, 5}, "of the broken object's blocks those that were asked for"
        assert worker.agent.wait_idle(run.name, 20)
        assert worker.serve(other).hit.tokens == 16


def test_a_hit_of_another_prompt_is_refused() -> None:
    spec = spec_of([0])
    pool = MemoryPool(Memory(1 << 16))
    stored, mine = Chain(ROOT, [7] * CHUNK, CHUNK), Chain(ROOT, [7] * 4 + [1] * 9, CHUNK)
    store(pool, spec, 0, spec.shard, stored, 0, CHUNK)
    found = find_hit(pool, spec, ROOT, mine.digests, len(mine), tail_digest=mine.tail, blocks=blocks_of(mine, spec))
    hit = hit_of(found, mine, spec)
    assert (hit.tokens, hit.tail_shared, hit.tail_digest) == (4, 4, stored.digests[0])
    tables = [np.arange(8)]
    (part,) = describe_loads(spec, [StepRequest("r", mine, tables, (0, 4), hit)])
    assert [(piece.digest, piece.blocks, piece.tokens) for piece in part.pieces] == [
        (stored.digests[0], range(2), CHUNK)
    ]
    other = Chain(ROOT, [7] * 3 + [2] * 9, CHUNK)
    with pytest.raises(SpecError, match="not one of this chain"):
        describe_loads(spec, [StepRequest("r", other, tables, (0, 4), hit)])


def test_block_digests_are_whole() -> None:
    assert len(Chain(ROOT, range(5), CHUNK).block_digests(0, BLOCK)) == 2 * DIGEST_BYTES


@pytest.mark.parametrize("window", [5, 6, 9, 17])
def test_a_prompt_that_ends_where_it_stops_sharing_loads_only_what_a_window_keeps(embed: Embed, window: int) -> None:
    """One token is left to compute: the window that is read then begins a token earlier, maybe in a block not kept."""
    spec = small_spec(4, 4, 16, row=8, window=window)
    with worker_on(embed(**PATIENT), spec=spec, blocks=128, lookup_timeout_s=30.0) as worker:
        for shared, more in itertools.product(range(1, 40), (0, 1, 5)):
            stored = worker.prompt(48)
            worker.serve(stored)
            other = worker.prompt(shared + more, like=stored, shared=shared)
            assert worker.serve(other).hit.tokens >= (shared - (not more)) // 16 * 16


class CountingPool(MemoryPool):
    """Counts the keys that are looked up and the tails that are listed."""

    listed = looked_up = 0

    def lookup(self, keys: Any) -> list[bool]:
        self.looked_up += len(keys)
        return super().lookup(keys)

    def tails(self, parent: bytes, most: int = 1 << 32, *, undigested: bool = False) -> Any:
        for tail in super().tails(parent, most, undigested=undigested):
            self.listed += 1
            yield tail


@pytest.mark.parametrize("stored", [300, 3000])
def test_prompts_that_follow_the_same_chunk_are_not_looked_at_for_each_other(stored: int) -> None:
    spec = spec_of([0])
    pool = CountingPool(Memory(1 << 20))
    chains = [Chain(ROOT, [number % 250, number // 250, 1, 2, 3, 4, 5], CHUNK) for number in range(stored)]
    for number, chain in enumerate(chains):
        store(pool, spec, 0, Shard(0, 1), chain, 0, 3 + number % 5)
    prompt = Chain(ROOT, [7, 1, 1, 2, 3, 4, 5], CHUNK)  # begins as the one of number 257, which has 5 tokens
    pool.listed = pool.looked_up = 0
    hit = find_hit(pool, spec, ROOT, prompt.digests, len(prompt), blocks=blocks_of(prompt, spec))
    assert hit_of(hit, prompt, spec).tokens == 5
    assert (pool.listed, pool.looked_up) == (0, 1), "the prompt's own digests tell which one it is"

    pool.listed = pool.looked_up = 0
    find_hit(pool, spec, ROOT, prompt.digests, len(prompt))
    assert pool.listed <= 256 and pool.looked_up <= 256, "a client that does not say its digests costs no more than so"


def test_a_tail_shorter_than_a_block_is_found_among_others_and_longer_ones_than_the_prompt_are_not_listed() -> None:
    spec = spec_of([0])
    pool = CountingPool(Memory(1 << 20))
    for number in range(1000):
        store(pool, spec, 0, Shard(0, 1), Chain(ROOT, [number % 250, number // 250, 1, 2, 3, 4], CHUNK), 0, 6)
    prompt = Chain(ROOT, [9, 9, 9, 9], CHUNK)
    store(pool, spec, 0, Shard(0, 1), prompt, 0, 1)
    hit = find_hit(pool, spec, ROOT, prompt.digests, len(prompt), blocks=blocks_of(prompt, spec))
    assert hit_of(hit, prompt, spec).tokens == 1
    assert pool.listed == 1


@pytest.mark.parametrize("stored", [300, 3000])
def test_of_any_number_of_chunks_the_one_that_shares_most_is_found_without_a_look_at_the_others(stored: int) -> None:
    """The oldest of them, of which all have the first block in common."""
    spec = spec_of([0])
    pool = CountingPool(Memory(1 << 20))
    for number in range(stored):
        like = Chain(ROOT, [7, 7, *divmod(number, 250), 1, 2, 3, 4], CHUNK)
        store(pool, spec, 0, Shard(0, 1), like, 0, CHUNK)
    prompt = Chain(ROOT, [7, 7, 0, 0, 1, 2, 9, 9, 9], CHUNK)
    pool.looked_up = 0
    hit = find_hit(pool, spec, ROOT, prompt.digests, len(prompt), blocks=blocks_of(prompt, spec))
    assert hit_of(hit, prompt, spec).tokens == 6
    assert pool.looked_up <= 1 + len(prompt.digests)

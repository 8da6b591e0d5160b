"""A router's belief against real hits: two engines share a pool, and everything else may restart."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import structlog
from connectors.routers import BlockPlaces, DynamoRouter, LlmdIndexer

from layerflow.agent.control import Control
from layerflow.connectors.common import announcer
from layerflow.connectors.common.announcer import Announcer
from layerflow.connectors.common.block_ledger import BlockEvent, BlockGroup, BlockLedger
from layerflow.errors import ServerLost, VersionMismatch
from layerflow.keys import Chain, object_key, root_digest
from layerflow.server.chunk_journal import ABSENT, ARENA, TIER, ChunkJournal, Described
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire.messages import ChunkChange, ChunkChanges, ChunkDescription

BLOCK, CHUNK = 4, 16
SIZE = BLOCK * 4
PLANES = (Plane("kv", "uint8", (1,)),)
SPEC = ModelSpec(
    "m",
    "c",
    (GroupSpec("full", BLOCK, (0,), PLANES), GroupSpec("sliding", BLOCK, (1,), PLANES, window=BLOCK)),
    chunk_tokens=CHUNK,
)
FULL, WINDOW = GROUPS = (0, 1)
ROOT = root_digest(SPEC.fingerprint)


class PoolServer:
    """A server's arena, disk and journal."""

    def __init__(self, disk: set[bytes], room: int) -> None:
        self.epoch = random.getrandbits(62) + 1
        self.arena: set[bytes] = set()
        self.disk = disk
        self.up = True
        self.journal = ChunkJournal(self._where, lambda: room)
        self.inherited = frozenset(disk)  #: what was on disk before anybody had described it to this server

    def describes(self, digest: bytes) -> bool:
        record = self.journal._record(digest)
        return record is not None and record.chunk is not None

    def _where(self, keys: Sequence[bytes]) -> int:
        if self.arena.issuperset(keys):
            return ARENA
        return TIER if (self.arena | self.disk).issuperset(keys) else ABSENT

    def change(self, place: set[bytes], digest: bytes, there: bool, groups: Sequence[int] = GROUPS) -> None:
        for group in groups:
            key = object_key(digest, group, SPEC.shard)
            (place.add if there else place.discard)(key)
            self.journal.object_changed(key)

    def state(self, digest: bytes, group: int) -> int:
        return self._where([object_key(digest, group, SPEC.shard)])

    def hit(self, chain: Chain, *, described: bool = False) -> int:
        """Tokens of a prompt's leading chunks that are there.

        :param described: only of those that somebody has described. The others are what this server found on its disk.
        """
        tokens = 0
        for digest in [*chain.digests, chain.tail]:
            if not digest or not self.state(digest, FULL):
                break
            key = object_key(digest, FULL, SPEC.shard)
            held = min(CHUNK, len(chain) - tokens)
            if described and held >= BLOCK and not self.describes(digest):
                assert key in self.inherited, "a chunk that was stored under this server is not described"
                break
            tokens += held
        return tokens


class DirectControl:
    """A client of the server that stands in the world now."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _server(self) -> PoolServer:
        if not self._world.server.up:
            raise ServerLost("killed")
        return self._world.server

    def describe_chunks(self, chunks: Sequence[ChunkDescription], timeout_s: float) -> None:
        for chunk in chunks:
            journal = self._server().journal
            described = Described(chunk.digest, chunk.parent, chunk.tokens, chunk.extra)
            for _ in itertools.chain(journal.describe(SPEC, described), journal.shrink()):
                pass

    def read_chunks(self, epoch: int, after: int, begun: int, timeout_s: float) -> ChunkChanges:
        server = self._server()
        place = (after, begun) if epoch == server.epoch else (0, 0)
        work = server.journal.read(SPEC.fingerprint, *place, 5)
        while True:
            try:
                next(work)
            except StopIteration as end:
                read = end.value
                break
        changes = [
            ChunkChange(each.digest, each.states, *(each.chunk[1:] if each.chunk else ())) for each in read.changes
        ]
        return ChunkChanges(0, server.epoch, read.upto, read.begun, read.more, changes)

    def close(self) -> None:
        pass


class Channel:
    """An engine's publisher: whoever listens gets everything, from when it has connected on."""

    def __init__(self, world: World, pod: str) -> None:
        self._world, self._pod = world, pod
        self.news = False

    def publish(self, events: Sequence[BlockEvent]) -> None:
        self._world.places.take(self._pod, events)
        main = [event for event in events if event.group == FULL]
        for indexer in (*self._world.indexers, *self._world.dynamo):
            indexer.take(self._pod, main)

    def missed(self) -> bool:
        missed, self.news = self.news, False
        return missed


def leading(blocks: set[bytes], prompt: bytes) -> int:
    """Leading blocks of a prompt that are there: of other prompts too, where these begin alike."""
    count = 0
    while (count + 1) * SIZE <= len(prompt) and prompt[: (count + 1) * SIZE] in blocks:
        count += 1
    return count


def hashes_of(engine: str) -> Any:
    def hash_units(before: bytes | None, chunk: ChunkChange) -> list[bytes]:
        hashes = []
        for at in range(0, len(chunk.tokens) - SIZE + 1, SIZE):
            start = (before or b"none") + engine.encode()
            before = hashlib.sha256(start + chunk.tokens[at : at + SIZE]).digest()
            hashes.append(before)
        return hashes

    return hash_units


class World:
    def __init__(self, seed: int, room: int = 1 << 40) -> None:
        self.rng = random.Random(seed)
        self.room = room
        self.server = PoolServer(set(), room)
        self.indexers, self.dynamo = [LlmdIndexer()], [DynamoRouter(SIZE)]
        self.places = BlockPlaces()
        self.pods = ["one", "two"]
        self.channels = {pod: Channel(self, pod) for pod in self.pods}
        self.engines = {pod: self._engine(pod) for pod in self.pods}
        # Prompts that go on with each other's beginnings, and leave them inside of chunks.
        self.prompts: list[list[int]] = []
        for _ in range(24):
            shared = self.rng.choice(self.prompts)[: self.rng.randrange(60)] if self.prompts else []
            self.prompts.append([*shared, *(self.rng.randrange(1 << 20) for _ in range(self.rng.randrange(4, 60)))])

    def _engine(self, pod: str) -> Announcer:
        self.ledgers = getattr(self, "ledgers", {})
        groups = [BlockGroup(FULL, BLOCK, (FULL,), True), BlockGroup(WINDOW, BLOCK, (WINDOW,), False)]
        self.ledgers[pod] = ledger = BlockLedger(groups, BLOCK, hashes_of(pod))
        made = Announcer(lambda: cast(Control, DirectControl(self)), ledger, self.channels[pod], heartbeat_s=60)
        made._rest = lambda worked_s: False  # type: ignore[method-assign]
        return made

    def describe(self, chain: Chain, tokens: int) -> Iterator[ChunkDescription]:
        ids = chain.tokens.astype("uint32").tobytes()
        full, rest = divmod(tokens, CHUNK)
        for number in reversed(range(full + (rest >= BLOCK))):
            held = min(CHUNK, tokens - number * CHUNK)
            raw = ids[number * CHUNK * 4 : (number * CHUNK + held) * 4]
            yield ChunkDescription(chain.partial(number, held), chain.parent(number) if number else b"", raw)

    def act(self) -> None:
        rng, server = self.rng, self.server
        chain = Chain(ROOT, rng.choice(self.prompts), CHUNK)
        digests = [*chain.digests, *([chain.tail] if chain.tail else [])]
        pod, act = rng.choice(self.pods), rng.random()
        if act < 0.35 and server.up:  # an engine computes a prompt, and saves it once it has said so
            self.engines[pod].stored(lambda: self.describe(chain, len(chain)))
            self.engines[pod].turn()
            for digest in digests[: rng.randrange(1, len(digests) + 1)]:
                groups = rng.choice((GROUPS, GROUPS, (FULL,)))
                server.change(server.arena, digest, True, groups)
                if rng.random() < 0.3:
                    server.change(server.disk, digest, True, groups)
        elif act < 0.6:
            groups = rng.choice((GROUPS, (FULL,), (WINDOW,)))
            server.change(rng.choice((server.arena, server.disk)), rng.choice(digests), False, groups)
        elif act < 0.75 and server.up and (tokens := server.hit(chain)):
            self.engines[pod].found(lambda: self.describe(chain, tokens))
        elif act < 0.77:
            at = rng.randrange(2)
            (self.indexers, self.dynamo)[at][0] = (LlmdIndexer(), DynamoRouter(SIZE))[at]  # type: ignore[index]
            for channel in self.channels.values():
                channel.news = True
        elif act < 0.78 and server.up:
            server.up = False
            server.arena.clear()
        elif act < 0.85 and not server.up:
            self.server = PoolServer(server.disk, self.room)
        else:
            self.engines[pod].turn()

    def heartbeat(self) -> None:
        for engine in self.engines.values():
            engine.turn()
            engine.turn()  # a description that went with the first is told with the second

    def check(self, *, described: bool = False) -> tuple[int, int]:
        """(blocks that are believed and cannot be hit, blocks that can be hit and are not known), over all prompts.

        Then the same of each block's places, over the cache groups.

        :param described: count no block that only the disk knows, as of :meth:`PoolServer.hit`.
        """
        believed = unknown = 0
        places = self._places(described) if self.server.up else set()
        real_blocks = {prefix for group, prefix, _ in places if group == FULL}
        for pod in self.pods:
            self.ledgers[pod].validate()
            told = self.places.of(pod)
            believed += len(told - places)
            unknown += len(places - told)
            for prompt in self.prompts:
                raw = Chain(ROOT, prompt, CHUNK).tokens.astype("uint32").tobytes()
                real = leading(real_blocks, raw)
                for found in (self.indexers[0].blocks(pod, raw, SIZE), self.dynamo[0].blocks(pod, raw)):
                    believed += max(0, found - real)
                    unknown += max(0, real - found)
        return believed, unknown

    def _places(self, described: bool) -> set[tuple[int, bytes, int]]:
        """Group, tokens up to its end, and state of each block of the prompts that a hit can reach."""
        places = set()
        for prompt in self.prompts:
            chain = Chain(ROOT, prompt, CHUNK)
            mine = chain.tokens.astype("uint32").tobytes()
            digests = [*chain.digests, chain.tail]
            for at in range(self.server.hit(chain, described=described) // BLOCK):
                prefix, digest = mine[: (at + 1) * SIZE], digests[at * BLOCK // CHUNK]
                states = ((group, self.server.state(digest, group)) for group in GROUPS)
                places |= {(group, prefix, state) for group, state in states if state}
        return places

    def all_described(self) -> None:
        """Every prompt is hit once: what was on disk when all that knew it were gone is known from here on."""
        for prompt in self.prompts:
            chain = Chain(ROOT, prompt, CHUNK)
            if self.server.up and (tokens := self.server.hit(chain)):
                self.engines["one"].found(lambda chain=chain, tokens=tokens: self.describe(chain, tokens))  # type: ignore[misc]


def run(seed: int, events: int) -> None:
    world, checks = World(seed), 0
    for number in range(events):
        world.act()
        if number % 20 == 19:
            world.heartbeat()
            assert world.check(described=True) == (0, 0), f"event {number}"
            if world.check() != (0, 0):  # some are known by nobody but the disk: a hit is what tells of them
                world.all_described()
                world.heartbeat()
                assert world.check() == (0, 0), f"event {number}"
            checks += 1
            assert not world.indexers[0].skipped, "llm-d skips what follows an unknown parent"
            assert not world.dynamo[0].dropped
    assert checks


@pytest.mark.parametrize("seed", range(3))
def test_belief_is_what_can_be_hit(seed: int) -> None:
    run(seed, 300)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_events(seed: int) -> None:
    run(1000 + seed, 2500)


def test_both_pods_are_credited_and_nothing_is_skipped_after_a_restart_of_the_indexer() -> None:
    world = World(1)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    world.engines["one"].stored(lambda: world.describe(chain, len(chain)))
    world.heartbeat()
    for digest in chain.digests[:2]:
        world.server.change(world.server.arena, digest, True)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, SIZE) for pod in world.pods] == [8, 8]
    world.indexers[0] = LlmdIndexer()
    for channel in world.channels.values():
        channel.news = True
    world.heartbeat()
    world.server.change(world.server.arena, chain.digests[2], True)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, SIZE) for pod in world.pods] == [12, 12]
    assert world.indexers[0].skipped == 0
    # A router that counts, and has been there all the time, has each block once.
    world.server.change(world.server.arena, chain.digests[0], False)
    world.heartbeat()
    assert [world.dynamo[0].blocks(pod, raw) for pod in world.pods] == [0, 0]
    assert [world.indexers[0].blocks(pod, raw, SIZE) for pod in world.pods] == [0, 0]


def test_one_chunk_that_cannot_be_read_costs_no_other() -> None:
    world = World(4)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    good = Chain(ROOT, list(range(100, 100 + 2 * CHUNK)), CHUNK)
    raw, good_raw = (each.tokens.astype("uint32").tobytes() for each in (chain, good))

    def hash_units(before: bytes | None, chunk: ChunkChange) -> list[bytes]:
        if chunk.digest == chain.digests[1]:
            raise IndexError("one key for two units")
        hashes: list[bytes] = hashes_of("one")(before, chunk)
        return hashes

    world.ledgers["one"]._hash_units = hash_units
    for each in (chain, good):
        world.engines["one"].stored(lambda each=each: world.describe(each, len(each)))  # type: ignore[misc]
    world.heartbeat()
    with structlog.testing.capture_logs() as logs:
        for digest in reversed([*chain.digests, *good.digests]):  # the first comes last, and brings the others
            world.server.change(world.server.arena, digest, True)
        world.heartbeat()
        world.server.change(world.server.arena, good.digests[1], False)
        world.heartbeat()
    assert [each["event"] for each in logs] == ["chunk_not_read"]
    assert [world.dynamo[0].blocks("one", each) for each in (raw, good_raw)] == [4, 4]
    assert [world.dynamo[0].blocks("two", each) for each in (raw, good_raw)] == [12, 4]
    world.ledgers["one"].validate()


def test_what_a_router_raises_on_is_handed_to_it_again() -> None:
    world = World(5)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    engine, channel = world.engines["one"], world.channels["one"]
    publish, raises = channel.publish, [False]

    def sometimes(events: Sequence[BlockEvent]) -> None:
        if raises[0]:
            raise RuntimeError("its queue is full")
        publish(events)

    channel.publish = sometimes  # type: ignore[method-assign]
    engine.stored(lambda: world.describe(chain, len(chain)))
    engine.turn()

    def fails(act: Callable[[], object]) -> int:
        """Blocks that are told after an act, of whose telling the first try fails."""
        act()
        raises[0] = True
        with pytest.raises(RuntimeError):
            engine.turn()
        raises[0] = False
        engine.turn()
        return len({prefix for _, prefix, _ in world.places.of("one")})

    def store(there: bool) -> None:
        for digest in chain.digests:
            world.server.change(world.server.arena, digest, there)

    assert fails(lambda: store(True)) == 12
    assert fails(lambda: setattr(world.dynamo[0], "counts", {}) or setattr(channel, "news", True)) == 12
    assert fails(lambda: store(False)) == 0
    assert fails(lambda: store(True)) == 12
    assert fails(lambda: setattr(world.server, "up", False)) == 0
    assert engine._lost_chunks, "what was known is described to the server that comes"
    assert not world.dynamo[0].dropped


def test_a_restart_between_two_heartbeats_loses_nothing_that_is_on_disk() -> None:
    world = World(2)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    world.engines["one"].stored(lambda: world.describe(chain, len(chain)))
    world.heartbeat()
    for digest in chain.digests:
        world.server.change(world.server.arena, digest, True)
        world.server.change(world.server.disk, digest, True)
    world.heartbeat()
    world.server = PoolServer(world.server.disk, world.room)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, SIZE) for pod in world.pods] == [12, 12]


def test_a_server_of_the_version_before_is_told_nothing_until_it_is_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    class OlderControl(DirectControl):
        def describe_chunks(self, chunks: Sequence[ChunkDescription], timeout_s: float) -> None:
            raise VersionMismatch("the server speaks protocol 1, which has no DescribeChunks")

        def read_chunks(self, epoch: int, after: int, begun: int, timeout_s: float) -> ChunkChanges:
            raise VersionMismatch("the server speaks protocol 1, which has no ReadChunks")

    monkeypatch.setattr(announcer, "UPGRADE_S", 0.0)
    world = World(3)
    chain = Chain(ROOT, list(range(CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    engine = world.engines["one"]
    engine._connect = lambda: cast(Control, OlderControl(world))
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            engine.stored(lambda: world.describe(chain, len(chain)))
            engine.turn()
    assert [each["event"] for each in logs] == ["routers_not_told"]
    assert not engine._waiting
    engine._connect = lambda: cast(Control, DirectControl(world))
    world.server.change(world.server.arena, chain.digests[0], True)
    engine.found(lambda: world.describe(chain, len(chain)))
    engine.turn()
    assert world.indexers[0].blocks("one", raw, SIZE) == 4

"""Two engines that share a pool, the routers that they tell, and everything that may happen meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from connectors.routers import BlockPlaces, DynamoRouter, LlmdIndexer

from layerflow.agent.control import Control
from layerflow.connectors.common.announcer import Announcer
from layerflow.connectors.common.block_ledger import BlockEvent, BlockGroup, BlockLedger
from layerflow.errors import ServerLost
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
FULL, WINDOW = 0, 1
ROOT = root_digest(SPEC.fingerprint)


class Prompt(NamedTuple):
    """:param view: what a router sees of a prompt besides its tokens. :param tells: more that decides its KV."""

    tokens: list[int]
    view: bytes = b""
    tells: Any = None

    @property
    def raw(self) -> bytes:
        """Its tokens, uint32."""
        return np.asarray(self.tokens, np.uint32).tobytes()


class PoolServer:
    """A server's arena, disk and journal.

    :param block: tokens of an engine's block.
    """

    def __init__(self, disk: set[bytes], room: int, spec: ModelSpec = SPEC, block: int = BLOCK) -> None:
        self.spec, self._block = spec, block
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

    @property
    def groups(self) -> range:
        return range(len(self.spec.groups))

    def change(self, place: set[bytes], digest: bytes, there: bool, groups: Iterable[int] | None = None) -> None:
        """:param groups: None = all."""
        for group in self.groups if groups is None else groups:
            key = object_key(digest, group, self.spec.shard)
            (place.add if there else place.discard)(key)
            self.journal.object_changed(key)

    def state(self, digest: bytes, group: int) -> int:
        return self._where([object_key(digest, group, self.spec.shard)])

    def hit(self, chain: Chain, *, described: bool = False) -> int:
        """Tokens of a prompt's leading chunks that are there.

        :param described: only of those that somebody has described. The others are what this server found on its disk.
        """
        tokens, size = 0, self.spec.chunk_tokens
        for digest in [*chain.digests, chain.tail]:
            if not digest or not self.state(digest, FULL):
                break
            key = object_key(digest, FULL, self.spec.shard)
            held = min(size, len(chain) - tokens)
            if described and held >= self._block and not self.describes(digest):
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
            for _ in itertools.chain(journal.describe(self._world.spec, described), journal.shrink()):
                pass

    def read_chunks(self, epoch: int, after: int, begun: int, timeout_s: float) -> ChunkChanges:
        server = self._server()
        place = (after, begun) if epoch == server.epoch else (0, 0)
        work = server.journal.read(server.spec.fingerprint, *place, 5)
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
        seen = self._world.seen(self._pod, events)
        self._world.places.take(self._pod, seen)
        main = [event for event in seen if event.group == FULL]
        for indexer in (*self._world.indexers, *self._world.dynamo):
            indexer.take(self._pod, main)

    def missed(self) -> bool:
        missed, self.news = self.news, False
        return missed


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
    """Of vLLM's blocks: several in a chunk, of which the last one may be partial, in two cache groups.

    :param room: bytes for descriptions.
    """

    spec, block = SPEC, BLOCK
    llmd_reads = True  #: llm-d's indexer is one that reads the engine's events

    def __init__(self, seed: int, room: int = 1 << 40) -> None:
        self.rng = random.Random(seed)
        self.room = room
        self.server = self.new_server(set())
        self.indexers, self.dynamo = [LlmdIndexer()], [DynamoRouter(self.size)]
        self.places = BlockPlaces()
        self.pods = ["one", "two"]
        self.channels = {pod: Channel(self, pod) for pod in self.pods}
        self.ledgers: dict[str, BlockLedger] = {}
        self.engines = {pod: self.engine(pod) for pod in self.pods}
        # Prompts that go on with each other's beginnings, and leave them inside of chunks.
        self.prompts: list[Prompt] = []
        for _ in range(24):
            shared = self.rng.choice(self.prompts).tokens[: self.rng.randrange(60)] if self.prompts else []
            tail = (self.rng.randrange(1 << 20) for _ in range(self.rng.randrange(4, 60)))
            self.prompts.append(self.prompt([*shared, *tail]))

    @property
    def size(self) -> int:
        """Bytes of a block's tokens."""
        return self.block * 4

    def new_server(self, disk: set[bytes]) -> PoolServer:
        return PoolServer(disk, self.room, self.spec, self.block)

    # What depends on the engine ---------------------------------------------------------------------

    def prompt(self, tokens: list[int]) -> Prompt:
        return Prompt(tokens)

    def chain(self, prompt: Prompt) -> Chain:
        return Chain(ROOT, prompt.tokens, CHUNK)

    def hash_units(self, pod: str) -> Any:
        return hashes_of(pod)

    def seen(self, pod: str, events: Sequence[BlockEvent]) -> Sequence[BlockEvent]:
        """What routers see of events."""
        return events

    def stored(self, pod: str, prompt: Prompt) -> None:
        """An engine saves a prompt."""
        self.engines[pod].stored(lambda: self.describe(self.chain(prompt), len(prompt.tokens)))

    def found(self, pod: str, prompt: Prompt, tokens: int) -> None:
        """An engine hits so much of a prompt."""
        self.engines[pod].found(lambda: self.describe(self.chain(prompt), tokens))

    def engine(self, pod: str) -> Announcer:
        groups = [BlockGroup(group, self.block, (group,), group == FULL) for group in self.server.groups]
        self.ledgers[pod] = ledger = BlockLedger(groups, self.block, self.hash_units(pod))
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

    # What happens ------------------------------------------------------------------------------------

    def act(self) -> None:
        rng, server = self.rng, self.server
        prompt = rng.choice(self.prompts)
        chain = self.chain(prompt)
        digests = [*chain.digests, *([chain.tail] if chain.tail else [])]
        pod, act = rng.choice(self.pods), rng.random()
        if act < 0.35 and server.up:  # an engine computes a prompt, and saves it once it has said so
            self.stored(pod, prompt)
            self.engines[pod].turn()
            for digest in digests[: rng.randrange(1, len(digests) + 1)]:
                groups = rng.choice((server.groups, server.groups, (FULL,)))
                server.change(server.arena, digest, True, groups)
                if rng.random() < 0.3:
                    server.change(server.disk, digest, True, groups)
        elif act < 0.6:
            groups = rng.choice((server.groups, *((group,) for group in server.groups)))
            server.change(rng.choice((server.arena, server.disk)), rng.choice(digests), False, groups)
        elif act < 0.75 and server.up and (tokens := server.hit(chain)):
            self.found(pod, prompt, tokens)
        elif act < 0.77:
            at = rng.randrange(2)
            (self.indexers, self.dynamo)[at][0] = (LlmdIndexer(), DynamoRouter(self.size))[at]  # type: ignore[index]
            for channel in self.channels.values():
                channel.news = True
        elif act < 0.78 and server.up:
            server.up = False
            server.arena.clear()
        elif act < 0.85 and not server.up:
            self.server = self.new_server(server.disk)
        else:
            self.engines[pod].turn()

    def heartbeat(self) -> None:
        for _ in range(2):  # what one engine describes in the first round all of them read in the second
            for engine in self.engines.values():
                engine.turn()

    # What follows --------------------------------------------------------------------------------------

    def check(self, *, described: bool = False) -> tuple[int, int]:
        """(blocks that are believed and cannot be hit, blocks that can be hit and are not known), over all prompts.

        Then the same of each block's places, over the cache groups.

        :param described: count no block that only the disk knows, as of :meth:`PoolServer.hit`.
        """
        believed = unknown = 0
        places = self._places(described) if self.server.up else set()
        blocks = {prefix for group, prefix, _ in places if group == FULL}
        for pod in self.pods:
            self.ledgers[pod].validate()
            told = self.places.of(pod)
            believed += len(told - places)
            unknown += len(places - told)
            for prompt in self.prompts:
                real = self._leading(blocks, prompt)
                for found in self.believed(pod, prompt):
                    believed += max(0, found - real)
                    unknown += max(0, real - found)
        return believed, unknown

    def believed(self, pod: str, prompt: Prompt) -> tuple[int, ...]:
        """Leading blocks with which each router credits an engine."""
        llmd = self.indexers[0].blocks(pod, prompt.raw, self.size, prompt.view)
        return (*([llmd] * self.llmd_reads), self.dynamo[0].blocks(pod, prompt.raw, prompt.view))

    def _leading(self, blocks: set[bytes], prompt: Prompt) -> int:
        """Leading blocks of a prompt that are there: of other prompts too, where these begin alike."""
        count, raw = 0, prompt.raw
        while (count + 1) * self.size <= len(raw) and prompt.view + raw[: (count + 1) * self.size] in blocks:
            count += 1
        return count

    def _places(self, described: bool) -> set[tuple[int, bytes, int]]:
        """Group, tokens up to its end, and state of each block of the prompts that a hit can reach."""
        places = set()
        for prompt in self.prompts:
            chain = self.chain(prompt)
            digests = [*chain.digests, chain.tail]
            for at in range(self.server.hit(chain, described=described) // self.block):
                prefix = prompt.view + prompt.raw[: (at + 1) * self.size]
                digest = digests[at * self.block // self.spec.chunk_tokens]
                states = ((group, self.server.state(digest, group)) for group in self.server.groups)
                places |= {(group, prefix, state) for group, state in states if state}
        return places

    def all_described(self) -> None:
        """Every prompt is hit once: what was on disk when all that knew it were gone is known from here on."""
        for prompt in self.prompts:
            if self.server.up and (tokens := self.server.hit(self.chain(prompt))):
                self.found("one", prompt, tokens)

    def live(self, events: int) -> None:
        """So many random events, checked as they go."""
        checks = 0
        for number in range(events):
            self.act()
            if number % 20 == 19:
                self.heartbeat()
                assert self.check(described=True) == (0, 0), f"event {number}"
                if self.check() != (0, 0):  # some are known by nobody but the disk: a hit is what tells of them
                    self.all_described()
                    self.heartbeat()
                    assert self.check() == (0, 0), f"event {number}"
                checks += 1
                assert not (self.llmd_reads and self.indexers[0].skipped), "llm-d skips what follows an unknown parent"
                assert not self.dynamo[0].dropped
        assert checks

"""What SGLang's engines tell routers of a pool: the contract under random events, in SGLang's own pages and hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest
import zmq
from connectors.router_world import DirectControl, Prompt, World
from connectors.sglang_stand_in import import_events
from e2e.known import eventually

from layerflow.agent.control import Control
from layerflow.connectors.common.announcer import Announcer
from layerflow.connectors.common.block_ledger import BlockEvent, BlockGroup, BlockLedger, RemovedBlocks, StoredBlocks
from layerflow.connectors.sglang import plugin
from layerflow.keys import HashedChain, root_digest
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire.messages import ChunkChange

module = import_events()

PAGE = 4
SPEC = ModelSpec("m", "c", (GroupSpec("full", 1, (0,), (Plane("kv", "uint8", (1,)),)),), chunk_tokens=PAGE)
ROOT = root_digest(SPEC.fingerprint)
STATES = {module.StorageMedium.CPU: 1, module.StorageMedium.DISK: 2}


class Names:
    """SGLang's table of adapters' names, of an engine that has them all."""

    def get(self, extra_key: str | None) -> str | None:
        return "poet" if extra_key == "adapter" else None

    resolve = get


class Tells(NamedTuple):
    extra_key: str | None = None
    cache_salt: str | None = None


NAMESPACES = (
    Tells(),
    Tells(),
    Tells(cache_salt="tenant"),
    Tells("group"),
    Tells("adapter"),
    Tells("adapter", "tenant"),
)


def view(cache_salt: str | None, lora_name: str | None) -> bytes:
    """What a router sees of a prompt besides its tokens: SGLang tells it no extra key."""
    return repr((cache_salt, lora_name)).encode()


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's, of this test."""
    made = dict(module.EventPublisherFactory._registry)
    monkeypatch.setattr(module.EventPublisherFactory, "_registry", made)
    return made


class SglangWorld(World):
    """A chunk is a page, and a page a block. Prompts have salts, extra keys and an adapter."""

    spec, block = SPEC, PAGE

    def __init__(self, seed: int) -> None:
        self.dynamo_format = bool(seed % 2)
        self.llmd_reads = not self.dynamo_format  # which has hashes of their own for extra keys
        self.events: dict[str, Any] = {}
        super().__init__(seed)

    def prompt(self, tokens: list[int]) -> Prompt:
        tells = self.rng.choice(NAMESPACES)
        return Prompt(tokens, view(tells.cache_salt, Names().get(tells.extra_key)), tells)

    def key(self, prompt: Prompt) -> Any:
        return module.RadixKey(array("q", prompt.tokens), prompt.tells.extra_key, cache_salt=prompt.tells.cache_salt)

    def chain(self, prompt: Prompt) -> HashedChain:
        key = self.key(prompt)
        whole = len(key) // PAGE * PAGE
        key.token_ids = key.token_ids[:whole]
        hashes = module.get_storage_hash_str(key, None, page_size=PAGE)
        return HashedChain(ROOT, [each.encode() for each in hashes], PAGE)

    def engine(self, pod: str) -> Announcer:
        events = self.events[pod] = module.PoolEvents(
            "zmq", page=PAGE, dynamo=self.dynamo_format, sources=(0,), names=Names()
        )
        module.EventPublisherFactory._registry["zmq"] = module.ZmqEventPublisher  # its publisher is a Channel here
        made = super().engine(pod)
        events._announcer, events._model, events._root = made, SPEC.fingerprint, ROOT
        return made

    def hash_units(self, pod: str) -> Any:
        return self.events[pod]._hashes.of_chunk

    def stored(self, pod: str, prompt: Prompt) -> None:
        self.events[pod].inserting(self.key(prompt))
        self.events[pod].saving()

    def found(self, pod: str, prompt: Prompt, tokens: int) -> None:
        pages = min(tokens // PAGE, len(prompt.tokens) // PAGE)
        hit = SimpleNamespace(device_hit_len=pages // 2 * PAGE, tail_hashes=["hash"] * (pages - pages // 2))
        ids = array("q", prompt.tokens)
        self.events[pod].found(SimpleNamespace(full_untruncated_fill_ids=ids, **prompt.tells._asdict()), hit)
        ids.append(7)  # SGLang goes on to append to its own

    def seen(self, pod: str, events: Sequence[BlockEvent]) -> Sequence[BlockEvent]:
        """SGLang's own events, as a router reads them."""
        found: list[BlockEvent] = []
        for event in self.events[pod]._router.batch(events).events:
            hashes, state = list(event.block_hashes), STATES[event.medium]
            assert all(-(1 << 63) <= each < 1 << 63 for each in hashes)
            if isinstance(event, module.BlockRemoved):
                found.append(RemovedBlocks(0, state, hashes))
                continue
            assert len(event.token_ids) == len(hashes) * event.block_size == len(hashes) * PAGE
            tokens = np.asarray(event.token_ids, np.uint32).tobytes()
            extra = view(event.cache_salt, event.lora_name)
            found.append(StoredBlocks(0, state, hashes, event.parent_block_hash, tokens, PAGE, extra, 0, 1))
        return found


@pytest.mark.parametrize("seed", range(4))
def test_belief_is_what_can_be_hit(seed: int) -> None:
    SglangWorld(seed).live(240)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_events(seed: int) -> None:
    SglangWorld(1000 + seed).live(2500)


CONFIG = msgspec.json.encode({"publisher": "zmq"}).decode()


def params(**given: Any) -> Any:
    """SGLang's CacheInitParams of the rank that publishes."""
    wanted = {"enable_kv_cache_events": True, "dynamo_kv_event_format": False, "kv_event_lora_names": Names()}
    return SimpleNamespace(page_size=PAGE, **wanted | given)


def test_without_events_and_on_other_ranks_nothing_is_kept(registry: dict[str, Any]) -> None:
    made = dict(registry)
    assert module.pool_events(params(), None, (0,)) is None
    assert module.pool_events(params(enable_kv_cache_events=False), CONFIG, (0,)) is None
    assert module.pool_events(params(), "{}", (0,)) is None
    assert module.pool_events(params(), '{"publisher": "unknown"}', (0,)) is None
    assert registry == made, "SGLang makes its publisher as ever"
    assert module.pool_events(params(), CONFIG, (0,)) is not None


class Engine:
    """What tells routers of one engine, by hand: heartbeat by heartbeat."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.events = module.pool_events(params(), CONFIG, (0,))
        self.connected: list[ModelSpec] = []

    def begin(self, spec: ModelSpec = SPEC) -> None:
        self.events.begin(spec, self._connect)

    def _connect(self, spec: ModelSpec) -> Control:
        self.connected.append(spec)
        return cast(Control, DirectControl(self._world))

    def turn(self) -> None:
        self.events._announcer.turn()


@pytest.fixture
def world() -> SglangWorld:
    return SglangWorld(0)


@pytest.fixture
def engine(world: SglangWorld, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Announcer, "start", lambda self: self)
    monkeypatch.setattr(Announcer, "_rest", lambda self, worked_s: False)
    return Engine(world)


@pytest.fixture
def prompt(world: SglangWorld) -> Prompt:
    """Of three pages, all in the arena, and described."""
    made = Prompt(list(range(3 * PAGE)), tells=Tells())
    world.stored("one", made)
    world.engines["one"].turn()
    for digest in world.chain(made).digests:
        world.server.change(world.server.arena, digest, True)
    return made


def published(publisher: Any) -> list[tuple[str, int]]:
    """What a publisher was given since the last call: by event its kind, and of how many blocks."""
    events = [event for batch in publisher.batches for event in batch.events]
    publisher.batches.clear()
    return [(type(event).__name__, len(getattr(event, "block_hashes", ()))) for event in events]


AGAIN = [("BlockRemoved", 1), ("BlockStored", 1)] * 3


@pytest.fixture
def publisher(registry: dict[str, Any], engine: Engine) -> Iterator[Any]:
    """SGLang's, which it makes after the linker."""
    made = registry["zmq"]()
    assert registry["zmq"] is module.ZmqEventPublisher, "the next one is SGLang's own again"
    yield made
    made.shutdown()


def test_what_was_told_before_there_was_a_publisher_is_told_again(
    engine: Engine, prompt: Prompt, registry: dict[str, Any]
) -> None:
    """The linker may have its server by then."""
    engine.begin()
    engine.turn()
    made = registry["zmq"]()
    engine.turn()
    assert published(made) == AGAIN
    engine.turn()
    assert published(made) == []
    made.shutdown()


def test_who_connects_late_is_told_again(engine: Engine, prompt: Prompt, publisher: Any) -> None:
    engine.begin()
    engine.turn()
    assert published(publisher) == [("BlockStored", 3)]
    engine.turn()
    assert published(publisher) == []
    with zmq.Context() as context, context.socket(zmq.SUB) as late:
        late.connect(publisher.address)
        assert eventually(lambda: engine.turn() or published(publisher) == AGAIN)
    engine.turn()
    assert published(publisher) == []


def test_after_a_flush_everybody_is_told_again(engine: Engine, prompt: Prompt, publisher: Any) -> None:
    engine.begin()
    engine.turn()
    publisher.publish(module.KVEventBatch(0.0, [module.AllBlocksCleared()]))
    assert published(publisher) == [("BlockStored", 3), ("AllBlocksCleared", 0)]
    engine.turn()
    assert published(publisher) == AGAIN
    publisher._running = False  # shutting down
    engine.events.withdraw()
    engine.turn()
    assert published(publisher) == []


def test_other_weights_take_back_what_was_told(
    engine: Engine, prompt: Prompt, publisher: Any, world: SglangWorld
) -> None:
    engine.begin()
    engine.turn()
    published(publisher)
    engine.begin()  # a flush of the same weights
    engine.turn()
    assert published(publisher) == []
    engine.events.withdraw()  # other weights, and no flush yet
    engine.events.withdraw()
    engine.events.found(SimpleNamespace(), SimpleNamespace())  # of before: not looked at
    for _ in range(2):
        engine.turn()
    assert published(publisher) == [("BlockRemoved", 3)]
    engine.begin()  # the old ones are back
    engine.turn()
    assert published(publisher) == [("BlockStored", 3)]
    world.server.spec = msgspec.structs.replace(SPEC, content="others")  # what it is asked for from here on
    engine.begin(world.server.spec)
    engine.turn()
    assert published(publisher) == [("BlockRemoved", 3)]
    assert [spec.content for spec in engine.connected] == ["c", "c", "others"]


def test_the_hooks_show_the_prompt_that_is_saved_and_the_one_that_hits(
    engine: Engine, prompt: Prompt, publisher: Any, world: SglangWorld
) -> None:
    engine.begin()
    announcer = engine.events._announcer
    hit = SimpleNamespace(device_hit_len=PAGE, tail_hashes=["one"])
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=SimpleNamespace(events=engine.events)))
    wrapper = SimpleNamespace(**vars(cache.linker), hit_markers={"hits": hit})
    key = world.key(prompt)
    plugin.prompt_inserted(cache, SimpleNamespace(key=key))
    assert not announcer._waiting, "nothing of it is saved so far"
    for _ in range(2):  # two nodes of it
        engine.events.saving()
    request = {"full_untruncated_fill_ids": key.token_ids, "extra_key": None, "cache_salt": None}
    plugin.hit_loaded(wrapper, SimpleNamespace(rid="misses", **request))
    plugin.hit_loaded(wrapper, SimpleNamespace(rid="hits", **request))
    waiting = [([chunk.digest for chunk in describe()], hits) for describe, hits in announcer._waiting]
    digests = world.chain(prompt).digests
    assert waiting == [(digests[::-1], False), (digests[1::-1], True)]
    for other in (None, SimpleNamespace(cache_linker=object())):  # other linkers
        plugin.prompt_inserted(SimpleNamespace(linker=other), SimpleNamespace(key=key))
    plugin.hit_loaded(SimpleNamespace(cache_linker=object(), hit_markers={}), SimpleNamespace(rid="hits"))
    plugin.hit_loaded(wrapper, SimpleNamespace(rid="hits"))  # an SGLang whose request has no tokens: told, not raised
    assert len(announcer._waiting) == 2


@pytest.mark.parametrize(
    ("tokens", "extra_key"),
    [([], None), ([1] * (PAGE - 1), None), ([1 << 32] * PAGE, None), ([1] * PAGE, "x" * 1024)],
    ids=["none", "no-page", "wide", "long-key"],
)
def test_what_no_description_can_hold_is_not_described(
    engine: Engine, tokens: list[int], extra_key: str | None
) -> None:
    engine.begin()
    engine.events.inserting(module.RadixKey(array("q", tokens), extra_key))
    engine.events.saving()
    (describe, _) = engine.events._announcer._waiting[0]
    assert list(describe()) == []


UNREADABLE = {
    "no msgpack": b"\xc1",
    "no namespace": msgspec.msgpack.encode(7),
    "of fewer parts": msgspec.msgpack.encode(("group", None)),
    "not text": msgspec.msgpack.encode(("group", 3, None)),
    "nested deep": b"\x93\xc0\xc0" + b"\x91" * 5000 + b"\xc0",
}


@pytest.mark.parametrize("extra", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_another_engine_says_is_published_or_not_told(extra: bytes) -> None:
    hashes = module.PageHashes(PAGE, dynamo=True)
    router = module.SglangRouter("zmq", PAGE, hashes)
    ledger = BlockLedger([BlockGroup(0, PAGE, (0,), True)], PAGE, hashes.of_chunk)
    tokens = bytes(4 * PAGE)
    assert ledger.apply(ChunkChange(b"bad", b"\x01", b"", tokens, extra)) == []
    assert ledger.apply(ChunkChange(b"short", b"\x01", b"", tokens[4:])) == []
    assert ledger.apply(ChunkChange(b"long", b"\x01", b"", tokens + tokens)) == []
    assert ledger.unread == 3
    good = ledger.apply(ChunkChange(b"good", b"\x01", b"", tokens, module.Namespace("group", "tenant").packed()))
    (event,) = router.batch(good).events
    assert (len(event.block_hashes), event.cache_salt) == (1, "tenant")

"""Stored pages on SGLang's own channel for KV cache events: hashed as by SGLang's recorder, read as by a router."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import random
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from connectors.event_channel import ANSWER_MS, Channel, Prefixes, believed, prefixes
from engines import Engine, Shape
from servers import A, Servers, is_written, pages, prompt, writes
from sglang.srt.disaggregation.kv_events import EventPublisherFactory
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import ExternalCacheHitMarker, UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import compute_node_hash_values

from layerflow.agent import Control
from layerflow.connectors.common.block_ledger import BlockEvent, BlockGroup, BlockLedger
from layerflow.connectors.sglang.events import MEDIUMS, PageHashes, PoolEvents
from layerflow.keys import HashedChain, root_digest
from layerflow.wire.messages import ChunkChange

PAGE = 16
MODEL = bytes(16)
ARENA, TIER = b"\x01", b"\x02"
LORA_ID = "0123456789abcdef" * 2


@dataclass
class Node:
    """Of SGLang's tree, as its recorder reads it."""

    key: Any
    parent: Any
    hash_value: list[str] | None = None
    event_hash_value: list[str] | None = None


def branch(tokens: Sequence[int], ends: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[Node]:
    """Nodes of one prompt, which end behind so many tokens each."""
    node, nodes, start = Node(RadixKey(array("q"), None), None, []), [], 0
    for end in ends:
        key = RadixKey(array("q", tokens[start:end]), extra_key, cache_salt=cache_salt)
        node = Node(key, node)
        node.hash_value = compute_node_hash_values(node, PAGE)
        nodes.append(node)
        start = end
    return nodes


@dataclass
class Told:
    """What routers are told of a prompt's pages, by page: hash, parent, tokens, size, salt, adapter."""

    pages: list[tuple[Any, ...]]
    removed: list[int]
    mediums: set[str]


def told(events: Sequence[Any]) -> Told:
    stored, removed, mediums = [], [], set()
    for event in events:
        mediums.add(str(event.medium.value))
        if type(event).__name__ == "BlockRemoved":
            removed += event.block_hashes
            continue
        parent = event.parent_block_hash
        for at, page in enumerate(event.block_hashes):
            tokens = event.token_ids[at * PAGE : (at + 1) * PAGE]
            stored.append((page, parent, tokens, event.block_size, event.cache_salt, event.lora_name))
            parent = page
    return Told(stored, removed, mediums)


NAMESPACES = [
    {},
    {"cache_salt": "tenant"},
    {"extra_key": "group"},
    {"extra_key": "group", "cache_salt": "tenant"},
    {"extra_key": LORA_ID, "lora": "poet"},
    {"extra_key": "group" + LORA_ID, "cache_salt": "tenant", "lora": "poet"},
]


@pytest.mark.parametrize("dynamo", [False, True], ids=["default", "dynamo"])
@pytest.mark.parametrize("named", NAMESPACES, ids=lambda each: "-".join(each) or "none")
def test_pages_have_the_hashes_of_sglangs_recorder(
    named: dict[str, str], dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventPublisherFactory, "_registry", dict(EventPublisherFactory._registry))
    extra_key, cache_salt, lora = named.get("extra_key"), named.get("cache_salt"), named.get("lora")
    names = KvEventLoraNames()
    if lora is not None:
        names.register(SimpleNamespace(extra_key=extra_key, lora_id=LORA_ID), lora)
    tokens = random.Random(1).choices(range(1 << 20), k=7 * PAGE + 5)
    nodes = branch(tokens, (2 * PAGE, 3 * PAGE, 7 * PAGE), extra_key, cache_salt)
    oracle = KVCacheEventRecorder(enabled=True, page_size=PAGE, dynamo_format=dynamo, lora_names=names)
    for node in nodes:
        oracle.record_store(node, medium=MEDIUMS[1])
    stored = told(oracle.take())
    for node in nodes:
        oracle.record_remove(node, medium=MEDIUMS[1])
    removed = told(oracle.take())

    events = PoolEvents("zmq", page=PAGE, dynamo=dynamo, sources=(0,), names=names)
    described: list[Any] = []
    announcer: Any = SimpleNamespace(stored=lambda describe: described.extend(describe()))
    events._announcer, events._model, events._root = announcer, MODEL, root_digest(MODEL)
    events.inserting(RadixKey(array("q", tokens), extra_key, cache_salt=cache_salt))
    events.saving()
    events.saving()  # of the same prompt: it is described once
    hashes = [each.encode() for node in nodes for each in node.hash_value or ()]
    digests = HashedChain(root_digest(MODEL), hashes, PAGE).digests
    assert [each.digest for each in described] == digests[::-1], "the chunks that the linker saves"

    # Another engine of the model has nothing but the descriptions, and no name of an adapter.
    other = PoolEvents("zmq", page=PAGE, dynamo=dynamo, sources=(0,), names=KvEventLoraNames())
    ledger = BlockLedger([BlockGroup(0, PAGE, (0,), True)], PAGE, PageHashes(PAGE, dynamo).of_chunk)
    batch = other._router.batch
    news = [
        event
        for each in reversed(described)
        for event in ledger.apply(ChunkChange(each.digest, ARENA, each.parent, each.tokens, each.extra))
    ]
    assert len(batch(news).events) == 1, "one event, as SGLang puts them together"
    assert told(batch(news).events) == stored
    assert stored.mediums == {"CPU_PINNED"}
    assert stored.pages[0][5] == (lora if lora else None)
    moved = told(batch(ledger.apply(ChunkChange(described[0].digest, TIER, *_rest(described[0])))).events)
    assert (moved.pages, moved.removed, moved.mediums) == (
        stored.pages[-1:], [stored.pages[-1][0]], {"DISK", "CPU_PINNED"}
    )  # fmt: skip
    gone: list[BlockEvent] = [event for piece in ledger.clear() for event in piece]
    assert sorted(told(batch(gone).events).removed) == sorted(removed.removed)


def _rest(chunk: Any) -> tuple[bytes, bytes, bytes]:
    return chunk.parent, chunk.tokens, chunk.extra


def test_what_the_hooks_rely_on() -> None:
    insert, load_back = UnifiedRadixCache.insert, UnifiedCacheLinkerWrapper.load_back
    assert list(inspect.signature(inspect.unwrap(insert)).parameters) == ["self", "params"]
    assert list(inspect.signature(inspect.unwrap(load_back)).parameters) == ["self", "req"]
    assert ExternalCacheHitMarker._fields == ("tail_hashes", "device_hit_len")
    assert "self._apply_cache_actions" in inspect.getsource(inspect.unwrap(insert)), "nodes are offloaded inside of it"
    assert "self.hit_markers.pop(req.rid" in inspect.getsource(inspect.unwrap(load_back))
    assert "self.full_untruncated_fill_ids" in inspect.getsource(Req.refresh_fill_ids)
    params = {field.name for field in dataclasses.fields(CacheInitParams)}
    assert {"enable_kv_cache_events", "dynamo_kv_event_format", "kv_event_lora_names", "page_size"} <= params
    assert "AllBlocksCleared()" in inspect.getsource(KVCacheEventRecorder.record_all_cleared)
    assert "is_kv_publisher_rank" in inspect.getsource(SchedulerKvEventsPublisher)


class Subscriber:
    """A router that has connected late: it hears what comes from now on."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._events: list[dict[str, Any]] = [{"type": "AllBlocksCleared"}]  # it knows nothing

    def wait(self, wanted: Prefixes) -> None:
        """Until it knows exactly this."""
        until = time.monotonic() + ANSWER_MS / 1e3
        while (found := prefixes(believed(self._events, POOL))) != wanted:
            assert time.monotonic() < until, f"heard {len(found)} places of {len(wanted)}"
            if self._socket.poll(100):
                self._events += msgspec.msgpack.decode(self._socket.recv_multipart()[-1])[1]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


POOL = ("CPU_PINNED", "DISK")
NAMED = {"extra_key": "group", "cache_salt": "tenant"}


def whole_pages(*prompts: Sequence[int]) -> Prefixes:
    """All whole pages of these prompts, in the arena."""
    return {
        (0, "CPU_PINNED"): {tuple(each[:end]) for each in prompts for end in range(PAGE, len(each) + 1, PAGE)},
    }


def own_pages(channel: Channel) -> dict[int, tuple[Any, list[int]]]:
    """What SGLang has told of its own cache: by hash the parent and the tokens."""
    found = {}
    for event in channel.events():
        if event["type"] == "BlockStored" and event.get("medium") == "GPU":
            parent = event["parent_block_hash"]
            for at, page in enumerate(event["block_hashes"]):
                found[page] = parent, event["token_ids"][at * PAGE : (at + 1) * PAGE]
                parent = page
    return found


@pytest.fixture(scope="module")
def channels() -> Iterator[list[Channel]]:
    with tempfile.TemporaryDirectory(prefix="lf-") as folder:  # short: a socket's path has 107 characters
        yield [Channel(Path(folder), name, POOL) for name in "ab"]


@pytest.fixture
def shapes(channels: list[Channel]) -> list[Shape]:
    """The second one only loads, and tells in the other format."""
    configs = [channels[0].config, channels[1].config | {"format": "dynamo"}]
    flags = [("--kv-events-config", json.dumps(config)) for config in configs]
    return [
        Shape("events-a", page=PAGE, flags=flags[0]),
        Shape("events-b", page=PAGE, flags=flags[1], extra=(("save", False),)),
    ]


@pytest.fixture
def pair(servers: Servers, channels: list[Channel], shapes: list[Shape]) -> list[Engine]:
    """Two servers with events, on a ``layerflow run`` that has nothing."""
    servers.stop_serving()
    servers.serve()
    engines = servers.start(*shapes)
    for channel in channels:
        channel.wait({})
    return engines


def test_each_engine_tells_what_any_has_stored(pair: list[Engine], servers: Servers, channels: list[Channel]) -> None:
    a, b = pair
    first, second = prompt(10 * PAGE), prompt(6 * PAGE)
    servers.store(a, first)
    for channel in channels:  # b takes no step meanwhile
        channel.wait(whole_pages(first))
    servers.store(a, second, **NAMED)
    for channel in channels:
        channel.wait(whole_pages(first, second))
    # The same page has the same hash on the device and in the pool.
    known, own = channels[0].believed()[0, "CPU_PINNED"], own_pages(channels[0])
    assert {page: own[page] for page in known} == known
    assert b.generate(second, **NAMED).host == pages(b, len(second))
    known = channels[1].believed()[0, "CPU_PINNED"]
    loaded = {page: each for page, each in own_pages(channels[1]).items() if page in known}
    assert len(loaded) == len(second) // PAGE
    assert {page: known[page] for page in loaded} == loaded
    # Whoever connects late is told again, and so are all when SGLang has them forget everything.
    with contextlib.closing(Subscriber(channels[1].endpoint)) as late:
        late.wait(whole_pages(first, second))
    cleared = [event["type"] for event in channels[1].events()].count("AllBlocksCleared")
    b.flush()
    channels[1].wait_for(lambda events: [each["type"] for each in events].count("AllBlocksCleared") > cleared)
    channels[1].wait(whole_pages(first, second))


def test_a_hit_tells_what_an_engine_without_events_has_stored(
    servers: Servers, channels: list[Channel], shapes: list[Shape]
) -> None:
    servers.stop_serving()
    servers.serve()
    silent, b = servers.start(A, shapes[1])
    asked = prompt(5 * PAGE)
    servers.store(silent, asked)
    channels[1].wait({})
    assert b.generate(asked).host == pages(b, len(asked))
    channels[1].wait(whole_pages(asked[: pages(b, len(asked))]))


def test_what_has_gone_is_taken_back(pair: list[Engine], servers: Servers, channels: list[Channel]) -> None:
    a, b = pair
    first, second = prompt(5 * PAGE), prompt(4 * PAGE)
    servers.store(a, first)
    for channel in channels:
        channel.wait(whole_pages(first))
    with contextlib.closing(Control(servers.endpoint)) as control:
        control.purge()
    for channel in channels:
        channel.wait({})
    servers.store(a, second)
    for channel in channels:
        channel.wait(whole_pages(second))
    # Other weights, other keys: what was told can be hit no more, by this engine only.
    b.spoiled = True
    b.update_weights_from_disk("llama-other")
    channels[1].wait({})
    channels[0].wait(whole_pages(second))
    servers.stop_serving()
    channels[0].wait({})


def test_two_ranks_tell_once_and_what_is_on_the_disk_is_told(
    servers: Servers, channels: list[Channel], shapes: list[Shape], tmp_path: Path
) -> None:
    """By SGLang's publisher of two ranks, and by a server of one. The pool is started anew with its disk alone."""
    on_disk = {"pool__disk__path": tmp_path / "pool", "pool__disk__capacity": "1GiB"}
    servers.end(shapes[0])
    servers.stop_serving()
    servers.serve(**on_disk)
    servers.until(writes)
    two, one = servers.start(dataclasses.replace(shapes[0], name="events-tp2", tp=2), shapes[1])
    first, second = prompt(10 * PAGE), prompt(6 * PAGE)
    for stored in (first, second):
        servers.store(two, stored)
    for channel in channels:
        channel.wait(whole_pages(first, second))  # which a block told by each rank would fail
    servers.until(is_written)
    servers.stop_serving()
    for channel in channels:
        channel.wait({})
    servers.serve(**on_disk)
    servers.attached(two, one)
    for channel in channels:
        channel.wait({(0, "DISK"): whole_pages(first, second)[0, "CPU_PINNED"]})
    one.flush()
    loaded = pages(one, len(first))
    assert one.generate(first).host == loaded
    for channel in channels:  # the last page was not asked for
        left = whole_pages(second)[0, "CPU_PINNED"] | {tuple(first)}
        channel.wait(whole_pages(first[:loaded]) | {(0, "DISK"): left})
    servers.end(two.shape)

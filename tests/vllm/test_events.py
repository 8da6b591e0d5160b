"""Stored chunks on vLLM's own channel for KV cache events, read as a router reads them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from comparison import prompt, settled, until
from connectors.event_channel import Channel, Prefixes
from engines import Engine, connector
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from vllm.v1.core import kv_cache_utils

from layerflow.agent import Control
from layerflow.connectors.common.block_ledger import BlockGroup, BlockLedger
from layerflow.connectors.vllm.scheduler.events import VllmRouter, hash_units
from layerflow.wire.messages import ChunkChange
from layerflow_cli.bench.harness import ServerProcess

CHUNK, BLOCK = 64, 32

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


class VllmChannel(Channel):
    """vLLM's, with its own switch."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name, ("CPU", "STORAGE"))
        self.config |= {"enable_kv_cache_events": True}


def blocks_of(*prompts: list[int], groups: int = 1) -> Prefixes:
    """All whole blocks of these prompts, in the arena."""
    found = {tuple(each[:end]) for each in prompts for end in range(BLOCK, len(each) + 1, BLOCK)}
    return {(group, "CPU"): found for group in range(groups)}


def serve_whole(engine: Engine, server: ServerProcess, asked: list[int]) -> int:
    """Serve a prompt; returns its hit, when all its saves have ended and vLLM has heard of it."""
    cached = engine.one(asked).cached
    settled(server.endpoint)
    engine.assert_no_block_lost()
    return cached


def test_what_is_told_is_vllms_own_blocks(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    server, channel = serve(), VllmChannel(tmp_path, "events")
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config, kv_events_config=channel.config, enable_prefix_caching=True)
    first = prompt(1, 3 * CHUNK + 40)
    assert serve_whole(engine, server, first) == 0
    channel.wait(blocks_of(first))
    typed = msgspec.msgpack.Decoder(type=KVEventBatch)  # as vLLM's own subscribers read them
    assert all(typed.decode(batch).events for batch in channel.batches())
    own = [event for event in channel.events() if event["type"] == "BlockStored" and event.get("medium") == "GPU"]
    assert set(channel.believed()[0, "CPU"]) <= {block for event in own for block in event["block_hashes"]}
    # A hit that stores something behind what it found; the prompts diverge inside of a chunk.
    second = first[: 2 * CHUNK + 32] + prompt(2, CHUNK + 5)
    assert serve_whole(engine, server, second) == 2 * CHUNK + 32  # vLLM's own cache has as much
    channel.wait(blocks_of(first, second))


def test_an_engine_that_attaches_tells_what_is_there_and_each_tells_of_the_others(
    serve: Serve, vllm: Start, tmp_path: Path
) -> None:
    server = serve()
    channels = [VllmChannel(tmp_path, name) for name in ("one", "two")]
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first, second = prompt(1, 2 * CHUNK + 1), prompt(2, 2 * CHUNK + 1)
    one = vllm("llama", kv_transfer_config=config, kv_events_config=channels[0].config)
    serve_whole(one, server, first)
    two = vllm("llama", kv_transfer_config=config, kv_events_config=channels[1].config)
    channels[1].wait(blocks_of(first))
    serve_whole(two, server, second)
    for channel in channels:  # the first engine takes no step meanwhile
        channel.wait(blocks_of(first, second))
    with contextlib.closing(Control(server.endpoint)) as control:
        control.purge()
    for channel in channels:
        channel.wait({})


def test_what_is_on_the_disk_is_told(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    """By each engine, also when the pool has been started anew with its disk alone; what a hit fetches moves."""
    server = serve(pool__disk__path=tmp_path / "pool", pool__disk__capacity="1GiB")
    until(server, lambda status: status["tier"]["up"])
    channels = [VllmChannel(tmp_path, name) for name in ("one", "two")]
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    one, two = (vllm("llama", kv_transfer_config=config, kv_events_config=channel.config) for channel in channels)
    first, second = prompt(1, 2 * CHUNK + 1), prompt(2, 2 * CHUNK + 1)
    for asked in (first, second):
        serve_whole(one, server, asked)
    for channel in channels:
        channel.wait(blocks_of(first, second))
    until(server, lambda status: status["tier"]["written_objects"] and not status["tier"]["backlog_bytes"])
    server.kill()
    for channel in channels:
        channel.wait({})
    server.restart()
    for channel in channels:
        channel.wait({(0, "STORAGE"): blocks_of(first, second)[0, "CPU"]})
    two.one(prompt(3, 20))  # a vLLM that looks up finds out that the server before is gone
    until(server, lambda status: {session["memory"] for session in status["sessions"]} == {True, False})
    assert serve_whole(two, server, first) == 2 * CHUNK
    for channel in channels:
        channel.wait(blocks_of(first) | {(0, "STORAGE"): blocks_of(second)[0, "CPU"]})


def test_forgetting_the_pool_is_told(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    server = serve()
    channel = VllmChannel(tmp_path, "events")
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config, kv_events_config=channel.config)
    asked = prompt(1, CHUNK + 1)
    serve_whole(engine, server, asked)
    channel.wait(blocks_of(asked))
    engine.reset(pool=True)
    channel.wait({})
    assert serve_whole(engine, server, asked) == 0
    channel.wait(blocks_of(asked))


class Batches(list[Any]):
    """A publisher."""

    publish = list.append


UNREADABLE = {
    "no msgpack": b"\xc1",
    "no keys": msgspec.msgpack.encode(7),
    "of fewer units": msgspec.msgpack.encode((None, [[["mm", "a", 0]]])),
    "of more units": msgspec.msgpack.encode((None, [None, None, [["mm", "a", 0]]])),
    "not in lists": msgspec.msgpack.encode((None, [5, 5])),
    "an adapter without a name": msgspec.msgpack.encode((3, [[["lora", "a"]]] * 2)),
    "maps": msgspec.msgpack.encode((None, [[["mm", {"a": 1}]], None])),
    "nested deep": b"\x92\xc0\x92" + b"\x91" * 5000 + b"\xc0\xc0",
}


@pytest.mark.parametrize("extra", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_another_engine_says_is_published_or_not_told(extra: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Batches()
    monkeypatch.setitem(EventPublisherFactory._registry, "one", lambda: made)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"none", raising=False)
    router = VllmRouter("one", [("full_attention", None)])
    EventPublisherFactory._registry["one"]()

    def hash_block(value: Any) -> bytes:
        return hashlib.sha256(repr(value).encode()).digest()

    ledger = BlockLedger([BlockGroup(0, BLOCK, (0,), True)], BLOCK, functools.partial(hash_units, hash_block, BLOCK))
    tokens = bytes(4 * 2 * BLOCK)
    assert ledger.apply(ChunkChange(b"bad", b"\x01", b"", tokens, extra)) == []
    assert ledger.unread == 1
    keys = [(("lora", "adapter"), ("mm", "image", 3)), (("lora", "adapter"),)]
    router.publish(ledger.apply(ChunkChange(b"good", b"\x01", b"", tokens, msgspec.msgpack.encode(("adapter", keys)))))
    (event,) = made[0].events
    assert len(event.block_hashes) == 2 and event.lora_name == "adapter"

"""Stored chunks on vLLM's own channel for KV cache events, read as a router reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from comparison import prompt, settled
from engines import Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
ANSWER_MS = 10_000
THE_END = (-1).to_bytes(8, "big", signed=True)

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


class Channel:
    """A publisher's endpoints, and what it has published so far."""

    def __init__(self, folder: Path, name: str) -> None:
        self._replay = f"ipc://{folder}/{name}-replay"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{name}",
            "replay_endpoint": self._replay,
        }

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        found: list[dict[str, Any]] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert dealer.poll(ANSWER_MS), "the publisher does not answer"
                *_, number, batch = dealer.recv_multipart()
                if number == THE_END:
                    return found
                found += msgspec.msgpack.decode(batch)[1]

    def stored(self) -> list[dict[str, Any]]:
        """Those of chunks."""
        return [event for event in self.events() if event["type"] == "BlockStored"]


def serve_whole(engine: Engine, server: ServerProcess, asked: list[int]) -> int:
    """Serve a prompt; returns its hit, when all its saves have ended and vLLM has heard of it."""
    cached = engine.one(asked).cached
    settled(server.endpoint)
    engine.assert_no_block_lost()
    return cached


@pytest.mark.parametrize(("model", "groups"), [("llama", 1), ("gemma3", 3)])
def test_stored_chunks(model: str, groups: int, serve: Serve, vllm: Start, tmp_path: Path) -> None:
    server = serve()
    channel = Channel(tmp_path, "events")
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm(model, kv_transfer_config=config, kv_events_config=channel.config)
    asked = prompt(1, 3 * CHUNK + 10)
    assert serve_whole(engine, server, asked) == 0
    stored = channel.stored()
    assert {event["group_idx"] for event in stored} == set(range(groups))
    for group in range(groups):
        mine = [event for event in stored if event["group_idx"] == group]
        assert [event["token_ids"] for event in mine] == [asked[at : at + CHUNK] for at in (0, CHUNK, 2 * CHUNK)]
        hashes = [event["block_hashes"][0] for event in mine]
        assert [event.get("parent_block_hash") for event in mine] == [None, *hashes[:-1]]
        assert len(set(hashes)) == 3
        assert {(event["block_size"], event["medium"]) for event in mine} == {(CHUNK, "CPU")}
    # A hit stores nothing; what is computed behind it does.
    serve_whole(engine, server, asked)
    assert len(channel.stored()) == len(stored)
    serve_whole(engine, server, asked[: 2 * CHUNK] + prompt(2, CHUNK + 5))
    more = channel.stored()[len(stored) :]
    assert [event["parent_block_hash"] for event in more] == [stored[1]["block_hashes"][0]] * groups


def test_another_engine_of_the_pool_tells_what_it_stores_itself(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    server = serve()
    channels = [Channel(tmp_path, name) for name in ("one", "two")]
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engines = [vllm("llama", kv_transfer_config=config, kv_events_config=channel.config) for channel in channels]
    first, second = prompt(1, 2 * CHUNK + 1), prompt(2, 2 * CHUNK + 1)
    serve_whole(engines[0], server, first)
    assert serve_whole(engines[1], server, first) == 2 * CHUNK
    serve_whole(engines[1], server, second)
    told = [[event["token_ids"] for event in channel.stored()] for channel in channels]
    assert told == [[first[:CHUNK], first[CHUNK:-1]], [second[:CHUNK], second[CHUNK:-1]]]


def test_forgetting_the_pool_is_told(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    server = serve()
    channel = Channel(tmp_path, "events")
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config, kv_events_config=channel.config)
    asked = prompt(1, CHUNK + 1)
    serve_whole(engine, server, asked)
    engine.reset(pool=True)
    assert serve_whole(engine, server, asked) == 0
    assert serve_whole(engine, server, asked) == CHUNK
    kinds = [event["type"] for event in channel.events()]
    assert (kinds[0], kinds[-1]) == ("BlockStored", "BlockStored")
    assert set(kinds[1:-1]) == {"AllBlocksCleared"}

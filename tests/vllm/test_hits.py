"""What is found again: whole chunks, tails, every length, by other requests and by other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from comparison import MAX_TOKENS, Comparison, expected_hit, prompt, settled
from engines import Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
EMBEDDED_S = 20.0

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


@pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole chunks"])
def test_every_length_around_blocks_and_chunks(tails: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK, discard_partial_chunks=not tails)
    engine = vllm("llama", kv_transfer_config=config)
    both = Comparison(plain("llama"), engine, server.endpoint, CHUNK, tails)
    lengths = [1, 2, *range(30, 35), *range(62, 67), *range(94, 99), *range(126, 131), *range(190, 195), 256, 257]
    prompts = [prompt(1000 + length, length) for length in lengths]
    both.serve(*prompts)
    for each in prompts:
        both.serve(each)
    both.serve(*prompts)
    both.serve(*[each + prompt(7, 37) for each in prompts])
    engine.assert_no_block_lost()


def test_a_chunk_is_256_tokens_where_nothing_else_is_said(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise"))
    both = Comparison(plain("llama"), engine, server.endpoint, 256)
    first = prompt(1, 700)
    both.serve(first)
    both.serve(first)
    both.serve(first[:600] + prompt(2, 50))
    both.serve(first[:200] + prompt(2, 50))


@pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole chunks"])
def test_prefixes_of_any_length_hit_to_the_block(tails: bool, serve: Serve, vllm: Start, plain: Start) -> None:
    """As far as vLLM's own prefix cache would: with chunks of 256 tokens, and suffixes that nobody shares."""
    server = serve()
    config = connector(server.endpoint, mode="layerwise", discard_partial_chunks=not tails)
    engine = vllm("llama", kv_transfer_config=config)
    both = Comparison(plain("llama"), engine, server.endpoint, 256, tails)
    for seed, length in enumerate((40, 300, 777, 1500)):
        for suffix in range(3):
            both.serve(prompt(seed, length) + prompt(100 * length + suffix, 64))
    engine.assert_no_block_lost()


def test_a_conversation_hits_all_that_was_said(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise"))
    both = Comparison(plain("llama"), engine, server.endpoint, 256)
    talks = [prompt(1, 70) + prompt(10 + number, 30) for number in range(2)]
    for turn in range(8):
        for number, talk in enumerate(talks):
            both.serve(talk)
            talks[number] = talk + prompt(1000 * turn + number, 37 + turn)
    engine.assert_no_block_lost()


def test_requests_of_one_step_with_prefixes_of_their_own(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK))
    both = Comparison(plain("llama"), engine, server.endpoint, CHUNK)
    prompts = [prompt(seed, 150 + 40 * seed) for seed in range(6)]
    both.serve(*prompts[:3])
    both.serve(*prompts)
    both.serve(*[each[: 70 + 20 * seed] + prompt(50 + seed, 60) for seed, each in enumerate(prompts)])
    engine.assert_no_block_lost()


def test_what_vllm_holds_itself_is_not_loaded(serve: Serve, vllm: Start, plain: Start) -> None:
    """vLLM's own prefix cache has the beginning, layerflow the rest: both count."""
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first = prompt(1, 300)
    saver = vllm("llama", kv_transfer_config=config)
    saver.one(first)
    settled(server.endpoint)
    engine = vllm("llama", kv_transfer_config=config, enable_prefix_caching=True)
    begun = first[:100] + prompt(2, 10)
    assert engine.one(begun).cached == 96  # three blocks: of the second chunk the first one
    engine.assert_no_block_lost()  # saves of short steps begin behind their answer
    settled(server.endpoint)
    assert engine.one(begun).cached == len(begun) - 1  # three blocks of its own, the tail from layerflow
    before = settled(server.endpoint)["flow"]["loaded_bytes"]
    answer = engine.one(first, max_tokens=MAX_TOKENS)
    assert answer.tokens == plain("llama").one(first, max_tokens=MAX_TOKENS).tokens
    assert answer.cached == len(first) - 1
    loaded = settled(server.endpoint)["flow"]["loaded_bytes"] - before
    saver.one(first)
    whole = settled(server.endpoint)["flow"]["loaded_bytes"] - before - loaded
    assert 0 < loaded < whole


def test_one_process_hits_what_another_saved(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first, second = vllm("llama", kv_transfer_config=config), vllm("llama", kv_transfer_config=config)
    prompts = [prompt(seed, 200) for seed in range(4)]
    both = Comparison(plain("llama"), first, server.endpoint, CHUNK)
    both.serve(*prompts)
    both.engine = second
    both.serve(*prompts)
    second.kill()
    both.engine = first
    both.serve(*prompts)


def test_a_producer_only_saves_and_a_consumer_only_loads(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    extra = {"mode": "layerwise", "chunk_tokens": CHUNK}
    producer = vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_producer", **extra))
    consumer = vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_consumer", **extra))
    made, own = prompt(1, 200), prompt(2, 200)
    tokens = plain("llama").one(made).tokens
    for _ in range(2):
        answer = producer.one(made)
        assert (answer.tokens, answer.cached) == (tokens, 0)
        settled(server.endpoint)
    objects = settled(server.endpoint)["pool"]["objects"]
    assert objects == 4
    for _ in range(2):
        assert consumer.one(own).cached == 0
        answer = consumer.one(made)
        assert (answer.tokens, answer.cached) == (tokens, len(made) - 1)
    assert settled(server.endpoint)["pool"]["objects"] == objects


def test_auto_decides_and_changes_no_token(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, chunk_tokens=CHUNK))
    prompts = [prompt(seed, 40 * seed) for seed in range(1, 9)]
    hits = 0
    for _ in range(3):
        for each in prompts:
            answer = engine.one(each)
            assert answer.tokens == plain("llama").one(each).tokens
            assert answer.cached in (0, expected_hit(each, prompts, CHUNK))
            hits += answer.cached
        settled(server.endpoint)
    assert hits > 0


def test_a_server_inside_the_engine(vllm: Start, plain: Start) -> None:
    """Without an endpoint there is nothing to install or to start."""
    engine = vllm("llama", kv_transfer_config=connector(None, mode="layerwise", chunk_tokens=CHUNK, pool_size="64MiB"))
    asked = prompt(1, 300)
    tokens = plain("llama").one(asked).tokens
    assert engine.one(asked).cached == 0
    deadline = time.monotonic() + EMBEDDED_S
    while True:  # until the save has ended; no endpoint tells
        answer = engine.one(asked)
        assert answer.tokens == tokens
        if answer.cached == len(asked) - 1:
            break
        assert time.monotonic() < deadline, "what was saved is never found"
    engine.assert_no_block_lost()

"""vLLM sleeps and wakes: nothing of layerflow's touches a cache that is unmapped, and what is stored is found later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import VERSION, Engine, connector

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

CHUNK, TOKENS, LONG = 64, 300, 1900
# 4 KiB a token over 4 MB/s: the saves of a prompt take 0.3 s, those of a long one 2 s.
SLOW = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "64KiB"}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]

pytestmark = pytest.mark.skipif(VERSION < (0, 33), reason="this vLLM tells no connector when it unmaps its cache")


def busy(endpoint: str) -> bool:
    """Do saves go on?"""
    status = fetch_status(endpoint)
    return bool(status["flow"]["steps"] or status["pool"]["half_written"])


@pytest.mark.timeout(300)
def test_sleep_wake_discard_and_pause(serve: Serve, vllm: Start) -> None:
    server = serve(**SLOW)
    engine = vllm(
        "llama",
        # Over so slow a link computing costs less than a load, which this engine would find out in the end.
        kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK),
        worker_cls="sleeping_worker.SleepingWorker",
    )
    asked, other, third = prompt(1, TOKENS), prompt(2, LONG), prompt(3, TOKENS)
    first = engine.one(asked, max_tokens=MAX_TOKENS)
    assert first.cached == 0
    settled(server.endpoint)
    assert engine.one(asked).cached == TOKENS - 1

    # Unmapped over saves, whatever vLLM did before: they are cut off, and what is stored stays.
    engine.one(other, max_tokens=1)
    assert busy(server.endpoint), "the saves have ended too soon to prove anything"
    engine.unmap()
    settled(server.endpoint)
    engine.wake()
    again = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (again.cached, again.tokens) == (TOKENS - 1, first.tokens), "the cache is loaded as it was"
    assert engine.one(other).cached < LONG - 1
    settled(server.endpoint)
    assert engine.one(other).cached == LONG - 1, "the engine saves again"

    # As /sleep does it, with a pause: nothing of before is found, for the weights may be others.
    engine.one(third, max_tokens=1)
    engine.assert_no_block_lost()
    engine.sleep("abort")
    engine.wake()
    again = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (again.cached, again.tokens) == (0, first.tokens)
    settled(server.endpoint)
    again = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (again.cached, again.tokens) == (TOKENS - 1, first.tokens)

    # Over a request that is kept.
    for how in ("keep", "discard"):
        engine.assert_no_block_lost()
        kept = engine.one_over_sleep(asked, MAX_TOKENS, 2, how)
        assert kept.tokens == first.tokens
        settled(server.endpoint)
    assert engine.one(asked).cached == TOKENS - 1, "the request that went on was computed anew, and saved"
    engine.assert_no_block_lost()

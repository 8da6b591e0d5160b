"""Engines of other tensor and pipeline sizes share one pool: what one has stored the other hits, token for token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import Comparison, prompt, settled
from engines import UNSERVED, Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
SLOW = {"pool__link_gbps": 0.01, "transfer__max_transfer_bytes": "64KiB"}  # loads that outlast their step

LATENT = pytest.mark.skipif("mla" in UNSERVED, reason="not served by this vLLM")


def size(ranks: int) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if ranks == 2 else {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "writing", "reading"),
    [
        ("llama", 2, 1),
        ("llama", 1, 2),
        pytest.param("mla", 2, 1, marks=LATENT),
        pytest.param("mla", 1, 2, marks=[LATENT, pytest.mark.campaign]),
    ],
)
def test_what_one_size_stored_another_hits(
    model: str,
    writing: int,
    reading: int,
    serve: Callable[..., ServerProcess],
    vllm: Callable[..., Engine],
    plain: Callable[..., Engine],
) -> None:
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    writer = vllm(model, kv_transfer_config=config, **size(writing))
    first, second = prompt(1, 600), prompt(2, 333)
    writer.generate(first, second)
    status = settled(server.endpoint)
    shares = writing if model == "llama" else 1
    assert status["pool"]["objects"] == shares * (10 + 6), "the latent is stored once, heads once each"
    writer.close()
    reader = vllm(model, kv_transfer_config=config, **size(reading))
    both = Comparison(plain(model), reader, server.endpoint, CHUNK, stored=[first, second])
    both.serve(first)
    both.serve(second + prompt(3, 40), first[:300] + prompt(4, 50))
    both.serve(second + prompt(3, 40))
    reader.assert_no_block_lost()


def staged() -> dict[str, Any]:
    return {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_cls": "staged_worker.StagedWorker",
        "max_num_batched_tokens": 256,  # a prompt takes several steps, of which two are in flight
        "enable_chunked_prefill": True,
    }


@pytest.mark.timeout(400)
def test_two_stages_and_one_hit_what_the_other_stored(
    serve: Callable[..., ServerProcess],
    vllm: Callable[..., Engine],
    plain: Callable[..., Engine],
) -> None:
    server = serve(**SLOW)
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    first, second, third = prompt(1, 600), prompt(2, 333), prompt(5, 700)
    two, one = vllm("llama", kv_transfer_config=config, **staged()), vllm("llama", kv_transfer_config=config)
    two.generate(first, second)
    assert settled(server.endpoint)["pool"]["objects"] == 2 * (10 + 6), "each stage stores its layers"
    of_one = Comparison(plain("llama"), one, server.endpoint, CHUNK, stored=[first, second])
    of_one.serve(first)
    of_one.serve(second + prompt(3, 40), first[:300] + prompt(4, 50))
    of_one.serve(third)
    of_two = Comparison(plain("llama"), two, server.endpoint, CHUNK, stored=of_one.stored)
    of_two.serve(third, second + prompt(3, 40))
    of_two.serve(third[:500] + prompt(6, 300), prompt(7, 650))
    of_two.serve(prompt(7, 650))
    # Loads fail on both stages while the next step is in flight: nothing that is computed behind them is found.
    asked = third + prompt(8, 500)
    two.break_loads(True)
    two.generate(asked)
    two.break_loads(False)
    assert "broken by the test" in two.output()
    settled(server.endpoint)
    wanted = plain("llama").one(asked).tokens
    for engine in (one, two, two):
        answer = engine.one(asked)
        assert answer.cached >= len(third) // 32 * 32 and answer.tokens == wanted
        settled(server.endpoint)
    for engine in (one, two):
        engine.assert_no_block_lost()

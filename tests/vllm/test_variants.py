"""vLLM's own switches: cache dtype, block size, chunked prefill, compiled models, tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import Comparison, prompt
from engines import Engine, connector

from layerflow_cli.bench.harness import ServerProcess

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp8 cache": (64, {"kv_cache_dtype": "fp8"}),
    "blocks of 64": (64, {"block_size": 64}),
    "blocks of 128": (128, {"block_size": 128}),
    "chunked prefill": (64, {"max_num_batched_tokens": 128, "max_num_seqs": 16}),
    "compiled": (64, {"enforce_eager": False}),
    "tp 2": (64, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "variant",
    [
        "fp8 cache",
        "blocks of 128",
        "chunked prefill",
        "compiled",
        "tp 2",
        pytest.param("blocks of 64", marks=pytest.mark.campaign),
    ],
)
def test_tokens_and_hits(
    variant: str,
    serve: Callable[..., ServerProcess],
    vllm: Callable[..., Engine],
    plain: Callable[..., Engine],
) -> None:
    chunk, arguments = VARIANTS[variant]
    server = serve()
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=chunk)
    engine = vllm("llama", kv_transfer_config=config, **arguments)
    reference = plain("llama", **({} if variant == "tp 2" else arguments))  # two ranks answer as one does
    both = Comparison(reference, engine, server.endpoint, chunk)
    first = prompt(1, 600)
    both.serve(first)
    both.serve(first)
    both.serve(first[:300] + prompt(2, 50))
    both.serve(first + prompt(3, 40))
    both.serve(prompt(4, 400), first[:500], prompt(5, 70))
    both.serve(prompt(4, 400), prompt(5, 70))
    engine.assert_no_block_lost()

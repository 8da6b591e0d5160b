"""Settings of transfer at their extremes, several at once, in a real vLLM: right tokens, every hit, no deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import Comparison, prompt, settled
from engines import Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
COMBINATIONS: dict[str, dict[str, Any]] = {
    "one layer ahead, one block a copy": {
        "transfer__prefetch_layers": 1,
        "transfer__max_transfer_blocks": 1,
    },
    "smallest budget": {
        "transfer__prefetch_layers": 1,
        "transfer__max_transfer_bytes": "4KiB",
        "transfer__max_inflight_bytes": "8KiB",
        # A page a message: what a busy machine takes for it is no finding.
        "transfer__step_timeout_ms": 60_000,
        "transfer__save_timeout_ms": 60_000,
    },
    "blocks split, staggered": {
        "transfer__prefetch_layers": 2,
        "transfer__max_transfer_bytes": "4KiB",
        "transfer__h2d_stagger_us": 500,
    },
    "largest values": {
        "transfer__prefetch_layers": 10_000,
        "transfer__max_transfer_blocks": 1 << 24,
        "transfer__max_transfer_bytes": "1GiB",
        "transfer__max_inflight_bytes": "4GiB",
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "combination",
    [
        "smallest budget",
        "blocks split, staggered",
        pytest.param("one layer ahead, one block a copy", marks=pytest.mark.campaign),
        pytest.param("largest values", marks=pytest.mark.campaign),
    ],
)
def test_tokens_hits_and_no_deadline(
    combination: str,
    serve: Callable[..., ServerProcess],
    vllm: Callable[..., Engine],
    plain: Callable[..., Engine],
) -> None:
    server = serve(**COMBINATIONS[combination])
    config = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    engine = vllm("llama", kv_transfer_config=config)
    both = Comparison(plain("llama"), engine, server.endpoint, CHUNK)
    first, second = prompt(1, 600), prompt(2, 130)
    both.serve(first, second)
    both.serve(first, second)
    both.serve(first[:300] + prompt(3, 50), first + prompt(4, 40))
    engine.assert_no_block_lost()
    status = settled(server.endpoint)
    assert status["flow"]["loaded_bytes"] > 0
    assert status["flow"]["expired_jobs"] == 0, "a load or a save ran to its deadline"
    assert status["flow"]["failed_parts"] == 0

"""Prefill and decode engines of which one, both or none has a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import prompt
from engines import MODELS, VERSION, Engine, connector
from legs import ORDERS

from layerflow_cli.bench.harness import ServerProcess

pytestmark = pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM runs no draft model on a CPU")

TOKENS, MAX_TOKENS = 300, 12
DRAFTED: dict[str, Any] = {
    "speculative_config": {"method": "draft_model", "model": str(MODELS / "llama"), "num_speculative_tokens": 2},
    "disable_log_stats": False,
}
ACCEPTED, GUESSED = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
Start = Callable[..., Engine]


@pytest.mark.timeout(300)
def test_a_decode_engine_starts_with_or_without_draft_layers(
    serve: Callable[..., ServerProcess], vllm: Start, plain: Start
) -> None:
    server = serve()

    def engine(role: str, **more: Any) -> Engine:
        return vllm("llama", kv_transfer_config=connector(server.endpoint, role, chunk_tokens=64), **more)

    prefill = {True: engine("kv_producer", **DRAFTED), False: engine("kv_producer")}
    decode = {True: engine("kv_consumer", **DRAFTED), False: engine("kv_consumer")}
    shares: dict[bool, float] = {}
    for p_drafts, d_drafts in [(True, True), (True, False), (False, True)]:
        d = decode[d_drafts]
        before = (d.metric(ACCEPTED), d.metric(GUESSED)) if d_drafts else (0, 0)
        for number, order in enumerate(ORDERS.values()):
            asked = prompt(100 * p_drafts + 10 * d_drafts + number, TOKENS)
            answer = order(prefill[p_drafts], d, asked, MAX_TOKENS)
            assert answer.tokens == plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
            told = (answer.transfer or {})["layerflow"]
            assert (told["handoff"], told["hit_tokens"]) == ("loaded", TOKENS - 1), told
        if d_drafts:
            shares[p_drafts] = (d.metric(ACCEPTED) - before[0]) / (d.metric(GUESSED) - before[1])
    assert shares[True] > 0.7 > shares[False], shares
    for each in (*prefill.values(), *decode.values()):
        each.assert_no_block_lost()

"""Prefill and decode engines of which one, both or none has a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import prompt
from drafting import DRAFTED, Guesses, needs_drafts
from engines import Engine, connector
from legs import ORDERS

from layerflow_cli.bench.harness import ServerProcess

pytestmark = needs_drafts

TOKENS, MAX_TOKENS = 300, 12
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
        guesses = Guesses(d) if d_drafts else None
        for number, order in enumerate(ORDERS.values()):
            asked = prompt(100 * p_drafts + 10 * d_drafts + number, TOKENS)
            answer = order(prefill[p_drafts], d, asked, MAX_TOKENS)
            assert answer.tokens == plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
            told = (answer.transfer or {})["layerflow"]
            assert (told["handoff"], told["hit_tokens"]) == ("loaded", TOKENS - 1), told
        if guesses is not None:
            shares[p_drafts] = guesses.share()
    assert shares[True] > 0.7 > shares[False], shares
    for each in (*prefill.values(), *decode.values()):
        each.assert_no_block_lost()

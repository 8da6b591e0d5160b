"""Inside vLLM's MultiConnector: both orders start, tokens are right, each serves what it has, statistics are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import VERSION, Engine, connector, multi
from foreign import PREFILL, assert_handed_over
from scenario import Terms
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from layerflow.connectors.vllm import LayerflowConnector
from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own example connector: whole prompts as files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["layerflow", "example"])
def test_with_vllms_example_connector(first: str, serve: Serve, vllm: Start, plain: Start, tmp_path: Path) -> None:
    server = serve()
    ours = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    theirs = example(tmp_path / "files")
    both = [ours, theirs] if first == "layerflow" else [theirs, ours]
    arguments = {"disable_hybrid_kv_cache_manager": True, "disable_log_stats": False}
    engine = vllm("llama", kv_transfer_config=multi(*both), **arguments)
    asked = prompt(1, 200)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.tokens, answer.cached) == (wanted, 0)
    stored = settled(server.endpoint)
    assert stored["pool"]["objects"] == 4, "the first prompt is saved, although its step brought the layouts"
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    # The example knows whole blocks, layerflow the partial tail too; the first that has something loads.
    assert (answer.tokens, answer.cached) == (wanted, 199 if first == "layerflow" else 192)
    loaded = settled(server.endpoint)["flow"]["loaded_bytes"]
    assert (loaded > 0) == (first == "layerflow")
    longer = asked + prompt(2, 70)
    answer = engine.one(longer, max_tokens=MAX_TOKENS)
    assert (answer.tokens, answer.cached) == (plain("llama").one(longer, max_tokens=MAX_TOKENS).tokens, 200)
    assert settled(server.endpoint)["flow"]["loaded_bytes"] > loaded
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_the_first_prompt_of_a_second_engine_hits(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    """It waits for the step that brings the layouts; only then is it looked up."""
    server = serve()
    asked = prompt(1, 200)
    vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)).one(asked)
    settled(server.endpoint)
    config = multi(connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK), example(tmp_path / "files"))
    engine = vllm("llama", kv_transfer_config=config, disable_hybrid_kv_cache_manager=True)
    assert engine.one(asked).cached == len(asked) - 1


@pytest.mark.timeout(300)
def test_behind_a_connector_with_a_handshake_of_its_own(serve: Serve, vllm: Start, plain: Start) -> None:
    """As NIXL: its handshake takes the one place that a MultiConnector has, and it refuses another's."""
    server = serve()
    foreign = {"kv_connector": "HandshakeConnector", "kv_connector_module_path": "foreign", "kv_role": "kv_both"}
    ours = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    asked = prompt(1, 200)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    for number, both in enumerate(([foreign, ours], [ours, foreign])):
        engine = vllm("llama", kv_transfer_config=multi(*both), disable_hybrid_kv_cache_manager=True)
        answer = engine.one(asked, max_tokens=MAX_TOKENS)
        assert (answer.tokens, answer.cached) == (wanted, 199 if number else 0)
        settled(server.endpoint)
        engine.assert_no_block_lost()
        engine.close()


@pytest.mark.timeout(300)
def test_beside_a_connector_that_hands_prompts_over(serve: Serve, vllm: Start, plain: Start) -> None:
    """As NIXL on a prefill engine: it answers the keys of a hand-off, and vLLM ends where two connectors do."""
    server = serve()
    foreign = {"kv_connector": "PrefillConnector", "kv_connector_module_path": "foreign", "kv_role": "kv_both"}
    ours = connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)
    asked = prompt(1, 200)
    wanted = plain("llama").one(asked, max_tokens=1).tokens
    engine = vllm("llama", kv_transfer_config=multi(foreign, ours))
    for cached in (0, 199):
        answer = engine.one(asked, max_tokens=1, terms=Terms(transfer=PREFILL))
        assert (answer.tokens, answer.cached) == (wanted, cached)
        assert_handed_over(answer)
        settled(server.endpoint)
        engine.reset()
    assert engine.one(asked, max_tokens=1).transfer is None
    engine.assert_no_block_lost()


def test_statistics_that_come_from_another_process_are_understood() -> None:
    """As plain dicts by class name: a MultiConnector asks vLLM's factory for the class of that name."""
    figures = {"loaded_bytes": 5}
    sent = {"data": figures} if VERSION < (0, 28) else figures
    told = MultiConnector.build_kv_connector_stats({LayerflowConnector.__name__: sent})
    assert told is not None
    assert told.data[LayerflowConnector.__name__].data == {"loaded_bytes": 5}

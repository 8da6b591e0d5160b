"""Two engines over one pool: one hits what the other stored where they compute the same, and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison import prompt, settled
from engines import MODELS, Engine, connector

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
ASKED = prompt(1, 300)

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def caching(server: ServerProcess) -> dict[str, Any]:
    return {"kv_transfer_config": connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)}


def stored(server: ServerProcess) -> int:
    return int(settled(server.endpoint)["pool"]["objects"])


@pytest.mark.timeout(400)
def test_longrope_is_shared_by_engines_that_chose_the_same_factors(serve: Serve, vllm: Start) -> None:
    server, tokens = serve(), {}
    for length, hit in ((2048, 0), (1024, 0), (512, 299)):
        engine = vllm("phi3", max_model_len=length, **caching(server))
        answer = engine.one(ASKED)
        tokens[length] = answer.tokens
        assert answer.cached == hit, f"max_model_len {length}"
        settled(server.endpoint)
        assert engine.one(ASKED).cached == 299
        engine.close()
    assert tokens[2048] != tokens[1024] == tokens[512]
    assert vllm("phi3", max_model_len=1024).one(ASKED).tokens == tokens[1024]


def test_a_length_of_which_nothing_follows_is_in_no_key(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    first = vllm("llama", max_model_len=2048, **caching(server))
    first.one(ASKED)
    settled(server.endpoint)
    first.close()
    answer = vllm("llama", max_model_len=777, **caching(server)).one(ASKED)
    assert (answer.tokens, answer.cached) == (plain("llama").one(ASKED).tokens, 299)


@pytest.mark.parametrize("by", ["hf-config-path", "another folder"])
def test_the_configuration_counts_wherever_it_comes_from(by: str, serve: Serve, vllm: Start, tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_theta": 500.0}
    changed: dict[str, Any] = {"hf_config_path": str(tmp_path)}
    if by == "hf-config-path":
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    else:
        shutil.copytree(MODELS / "llama", tmp_path / "copy")
        written = config | {"_name_or_path": "somebody/else", "transformers_version": "4.0", "eos_token_id": [2, 3]}
        (tmp_path / "copy" / "config.json").write_text(json.dumps(written))
        changed = {"folder": tmp_path / "copy"}
    server = serve()
    first = vllm("llama", **caching(server))
    same = first.one(ASKED)
    settled(server.endpoint)
    first.close()
    second = vllm("llama", **changed, **caching(server))
    answers = [second.one(ASKED)]
    settled(server.endpoint)
    answers.append(second.one(ASKED))
    [tokens] = {answer.tokens for answer in answers}
    if by == "another folder":
        assert [answer.cached for answer in answers] == [299, 299]
        assert tokens == same.tokens
    else:
        assert [answer.cached for answer in answers] == [0, 299]
        assert tokens == vllm("llama", **changed).one(ASKED).tokens != same.tokens


def test_another_type_of_the_cache_is_another_key(serve: Serve, vllm: Start) -> None:
    server = serve()
    first = vllm("llama", **caching(server))
    first.one(ASKED)
    settled(server.endpoint)
    first.close()
    engine = vllm("llama", kv_cache_dtype="fp8", **caching(server))
    answers = [engine.one(ASKED)]
    settled(server.endpoint)
    answers.append(engine.one(ASKED))
    assert [answer.cached for answer in answers] == [0, 299]
    assert {answer.tokens for answer in answers} == {vllm("llama", kv_cache_dtype="fp8").one(ASKED).tokens}


def test_a_start_does_not_wait_for_the_digest_of_its_weights(serve: Serve, vllm: Start, plain: Start) -> None:
    server, wanted = serve(), plain("llama").one(ASKED).tokens
    engine = vllm("llama", unread=True, **caching(server))
    for _ in range(2):
        answer = engine.one(ASKED)
        assert (answer.tokens, answer.cached) == (wanted, 0)
    assert stored(server) == 0
    engine.read_weights()
    engine.one(prompt(2, 40))  # its first step brings the worker's layout
    for hit in (0, 299):
        answer = engine.one(ASKED)
        assert (answer.tokens, answer.cached) == (wanted, hit)
        settled(server.endpoint)
    engine.assert_no_block_lost()
    other = vllm("llama", **caching(server)).one(ASKED)
    assert (other.tokens, other.cached) == (wanted, 299)


LAST, MEAN, CLS = ({"seq_pooling_type": kind} for kind in ("LAST", "MEAN", "CLS"))
STEP = {"tok_pooling_type": "STEP", "step_tag_id": 7, "task": "token_embed"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "pooler", "task", "reused"),
    [
        pytest.param("llama", LAST, "embed", True, id="embed LAST"),
        pytest.param("llama", MEAN, "embed", False, id="embed MEAN"),
        pytest.param("llama", CLS, "embed", False, id="embed CLS", marks=pytest.mark.campaign),
        pytest.param("llama", STEP, "token_embed", False, id="embed STEP", marks=pytest.mark.campaign),
        pytest.param("classifier", None, "classify", True, id="classify as it is"),
        pytest.param("classifier", MEAN, "classify", False, id="classify MEAN", marks=pytest.mark.campaign),
    ],
)
def test_poolers(model: str, pooler: dict[str, Any] | None, task: str, reused: bool, serve: Serve, vllm: Start) -> None:
    server = serve()
    pooling = {"runner": "pooling", "pooler_config": pooler, "skip_tokenizer_init": False}
    pooling |= {"convert": "embed"} if model == "llama" else {}
    engine, alone = vllm(model, **pooling, **caching(server)), vllm(model, **pooling)
    first, second = ASKED[:280], ASKED[:256] + prompt(3, 40)
    for number, asked in enumerate((first, first, second)):
        before = settled(server.endpoint)["flow"]["loaded_bytes"]
        [made], [wanted] = engine.pool(asked, task=task), alone.pool(asked, task=task)
        assert _close(made, wanted)
        hit = settled(server.endpoint)["flow"]["loaded_bytes"] > before
        assert hit is (reused and number > 0)
    assert (stored(server) > 0) is reused
    assert ("reuse_off" in engine.output()) is not reused
    engine.assert_no_block_lost()


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(_close(*pair) for pair in zip(one, other, strict=True))
    return bool(one == pytest.approx(other, abs=1e-3))


def test_prompts_that_are_given_as_embeddings_have_no_keys(serve: Serve, vllm: Start) -> None:
    server = serve()
    engine = vllm("llama", enable_prompt_embeds=True, **caching(server))
    reference = vllm("llama", enable_prompt_embeds=True)
    for asked in (ASKED, ASKED, prompt(4, 300)):
        assert engine.generate_embedded(asked) == reference.generate_embedded(asked)
    assert stored(server) == 0
    answer = engine.one(ASKED)
    assert (answer.tokens, answer.cached) == (reference.one(ASKED).tokens, 0)
    engine.assert_no_block_lost()

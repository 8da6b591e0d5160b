"""LoRA adapters, cache salts and images: what differs in one of them is never found under another."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora
from comparison import prompt, settled
from engines import Engine, connector
from scenario import PLAIN, Adapter, Answer, Terms

from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
ASKED = prompt(1, 300)
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 16, "max_lora_rank": 8}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]
_numbers = itertools.count(1)  # a vLLM that serves several tests never sees one twice


def config(server: ServerProcess) -> dict[str, Any]:
    return connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK)


def adapted(name: str, path: Path, number: int = 0, *, inplace: bool = False) -> Terms:
    return Terms(Adapter(name, number or next(_numbers), str(path), inplace))


def objects(server: ServerProcess) -> int:
    return int(settled(server.endpoint)["pool"]["objects"])


def test_adapters_on_and_off(serve: Serve, vllm: Start, plain: Start, tmp_path: Path) -> None:
    server = serve()
    engine, reference = vllm("llama", kv_transfer_config=config(server), **ADAPTERS), plain("llama", **ADAPTERS)
    first, second = (adapted(name, lora.adapter(tmp_path / name, seed)) for seed, name in enumerate("ab"))
    every = [PLAIN, first, second]
    wanted = [reference.one(ASKED, terms=terms).tokens for terms in every]
    assert len(set(wanted)) == 3, "adapters that change nothing prove nothing"
    for cached in (0, len(ASKED) - 1):
        for terms, tokens in zip(every, wanted, strict=True):
            answer = engine.one(ASKED, terms=terms)
            assert (answer.tokens, answer.cached) == (tokens, cached), f"with {terms.adapter}"
            settled(server.endpoint)
    # Beside one with an adapter, vLLM 0.32 on a CPU computes a request without one with the wrong weights.
    together = engine.generate(*[ASKED] * 2, terms=every[1:])
    assert [(answer.tokens, answer.cached) for answer in together] == [(each, len(ASKED) - 1) for each in wanted[1:]]
    engine.assert_no_block_lost()
    other = vllm("llama", kv_transfer_config=config(server), **ADAPTERS)
    exchanged = [
        PLAIN,
        *(adapted(name, lora.adapter(tmp_path / f"other {name}", seed)) for seed, name in enumerate("bac")),
    ]
    wanted.append(reference.one(ASKED, terms=exchanged[-1]).tokens)
    for terms, tokens, cached in zip(exchanged, wanted, (*[len(ASKED) - 1] * 3, 0), strict=True):
        answer = other.one(ASKED, terms=terms)
        assert (answer.tokens, answer.cached) == (tokens, cached), "found by what it holds, whatever it is called"
        settled(server.endpoint)
    other.close()
    without = vllm("llama", kv_transfer_config=config(server)).one(ASKED)
    assert (without.tokens, without.cached) == (wanted[0], len(ASKED) - 1), "no adapter: any vLLM of the model hits"


def test_an_adapter_with_other_weights_under_the_same_name(
    serve: Serve, vllm: Start, plain: Start, tmp_path: Path
) -> None:
    server = serve()
    engine, reference = vllm("llama", kv_transfer_config=config(server), **ADAPTERS), plain("llama", **ADAPTERS)
    path, copy = lora.adapter(tmp_path / "a", 1), tmp_path / "copy"

    def ask(terms: Terms) -> Answer:
        answer = engine.one(ASKED, terms=terms)
        assert answer.tokens == reference.one(ASKED, terms=terms).tokens
        settled(server.endpoint)
        return answer

    old = adapted("a", path)
    before = ask(old)
    assert before.cached == 0
    assert ask(old).cached == len(ASKED) - 1
    shutil.copytree(path, copy)
    lora.adapter(path, 2)
    stored = objects(server)
    assert ask(old).tokens == before.tokens, "vLLM goes on with what it has read"
    assert ask(old).cached == 0, "what the files hold now is not what vLLM computes with"
    assert objects(server) == stored
    new = adapted("a", path)
    after = ask(new)
    assert after.cached == 0
    assert after.tokens != before.tokens
    assert ask(new).cached == len(ASKED) - 1
    moved = adapted("another name", copy)
    again = ask(moved)
    assert (again.tokens, again.cached) == (before.tokens, len(ASKED) - 1)
    shutil.rmtree(copy)
    assert ask(moved).cached == len(ASKED) - 1, "vLLM has read it"

    lora.adapter(path, 3)
    stored = objects(server)
    replaced = adapted("a", path, new.adapter.number if new.adapter else 0, inplace=True)
    assert ask(replaced).cached == 0
    assert ask(new).cached == 0
    assert objects(server) == stored
    engine.assert_no_block_lost()


def test_blocks_of_an_old_adapter_in_vllms_own_cache_do_not_spread(serve: Serve, vllm: Start, tmp_path: Path) -> None:
    """It tells adapters apart by name and path: layerflow must not store what it makes of those blocks."""
    server = serve()
    engine = vllm("llama", kv_transfer_config=config(server), enable_prefix_caching=True, **ADAPTERS)
    path = lora.adapter(tmp_path / "a", 1)
    engine.one(ASKED, terms=adapted("a", path))
    stored = objects(server)
    lora.adapter(path, 2)
    new = adapted("a", path)
    assert engine.one(ASKED, terms=new).cached > 0, "vLLM finds its old blocks"
    assert objects(server) == stored
    engine.reset()
    engine.reset_now()  # a pause: here vLLM itself forgets them
    assert engine.one(ASKED, terms=new).cached == 0
    assert objects(server) > stored
    engine.assert_no_block_lost()


def test_salts(serve: Serve, vllm: Start, plain: Start) -> None:
    server = serve()
    engine = vllm("llama", kv_transfer_config=config(server))
    wanted = plain("llama").one(ASKED).tokens
    every = [PLAIN, Terms(salt="one"), Terms(salt="two")]
    for cached in (0, len(ASKED) - 1):
        for terms in every:
            answer = engine.one(ASKED, terms=terms)
            assert (answer.tokens, answer.cached) == (wanted, cached), f"salt {terms.salt}"
            settled(server.endpoint)
    assert [each.cached for each in engine.generate(*[ASKED] * 3, terms=every)] == [len(ASKED) - 1] * 3
    engine.assert_no_block_lost()
    other = vllm("llama", kv_transfer_config=config(server))
    for terms in (Terms(salt="three"), *every):
        answer = other.one(ASKED, terms=terms)
        assert (answer.tokens, answer.cached) == (wanted, 0 if terms.salt == "three" else len(ASKED) - 1)


def test_images(serve: Serve, vllm: Start) -> None:
    """Of a prompt with images all is found before the first that differs; the block it begins in is not."""
    server = serve()
    engine = vllm("llama", kv_transfer_config=config(server))
    cat, dog = (100, 60, "cat"), (220, 40, "dog")  # the cat lies across the second chunk's border
    seen = Terms(images=(cat, dog))
    assert engine.one(ASKED, terms=seen).cached == 0
    settled(server.endpoint)
    for images, different in [
        ((cat, dog), len(ASKED)),
        (((100, 60, "lion"), dog), 100),
        ((cat, (220, 40, "wolf")), 220),
        (((100, 60, "dog"), (220, 40, "cat")), 100),
        (((101, 60, "cat"), dog), 100),
        ((cat, (216, 40, "dog")), 216),
        ((cat,), 220),
        ((dog,), 100),
    ]:
        answer = engine.one(ASKED, terms=Terms(images=images))
        if different == len(ASKED):
            assert answer.cached == len(ASKED) - 1
        else:
            assert different // CHUNK * CHUNK <= answer.cached <= different, images
        settled(server.endpoint)
    engine.assert_no_block_lost()
